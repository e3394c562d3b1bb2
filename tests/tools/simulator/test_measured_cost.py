"""The cost curve of a calibration, the fit behind it, and the file it is kept in."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from simulated import PROFILE

from inflight.config import ConfigError
from inflight.engine.policies.cost_model import StepLoad
from inflight_tools.simulator.cost import MeasuredCost, fit_cost, nonnegative_least_squares
from inflight_tools.simulator.profile import find_profile, shipped_profiles

LOADS = [
    StepLoad(decodes, decodes * context).with_prefill(computed, chunk)
    if chunk
    else StepLoad(decodes, decodes * context)
    for decodes, context in ((1, 16), (4, 100), (16, 20), (17, 900), (32, 200), (64, 50))
    for computed, chunk in ((0, 0), (0, 64), (512, 256), (1024, 512))
]


def true_seconds(load: StepLoad) -> float:
    """A kernel that changes at 16 tokens: a jump, as CPUs have it."""
    tokens = load.tokens
    product = 0.001 if tokens <= 16 else 0.004 + 1e-4 * (tokens - 17)
    return product + 2e-5 * load.sequences + 1e-7 * load.context_tokens + 5e-9 * load.attention_pairs


def test_a_curve_with_a_jump_is_found_again():
    found = fit_cost([(load, true_seconds(load)) for load in LOADS])
    for load in LOADS:
        assert found.seconds(load) == pytest.approx(true_seconds(load), rel=0.05)
    beyond = StepLoad(64, 6400).with_prefill(0, 2048)
    assert found.seconds(beyond) == pytest.approx(true_seconds(beyond), rel=0.1)
    assert sorted(found.seconds_at) == found.seconds_at, "more tokens never cost less"


def test_a_step_that_the_machine_held_up_counts_as_long_as_it_took():
    """Means stay means: half of the steps of 1 ms, half of 3 ms."""
    found = fit_cost([(StepLoad(4, 40), 0.001), (StepLoad(4, 40), 0.003)] * 20)
    assert found.seconds(StepLoad(4, 40)) == pytest.approx(0.002, rel=0.01)


def test_between_knots_the_curve_is_straight_and_beyond_them_it_goes_on():
    cost = MeasuredCost(tokens=[2, 4, 8], seconds_at=[1.0, 2.0, 6.0])
    assert [cost.seconds(StepLoad(tokens)) for tokens in (1, 2, 3, 4, 6, 8, 10)] == [1, 1, 1.5, 2, 4, 6, 8]
    assert MeasuredCost(tokens=[1], seconds_at=[0.5]).seconds(StepLoad(9)) == 0.5


def test_least_squares_stay_above_zero():
    rng = np.random.default_rng(3)
    for _ in range(20):
        design, truth = rng.normal(size=(30, 6)), rng.normal(size=6)
        target = design @ truth + 0.1 * rng.normal(size=30)
        found = nonnegative_least_squares(design, target)
        gradient = design.T @ (target - design @ found)
        assert (found >= 0).all()
        # Karush, Kuhn and Tucker: nothing is gained by raising what is 0, or by moving what is not.
        assert gradient[found == 0].max(initial=-1.0) <= 1e-6
        assert np.abs(gradient[found > 0]).max(initial=0.0) <= 1e-6


def test_profiles_are_files(tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(PROFILE))
    assert find_profile(str(path)) == PROFILE
    with pytest.raises(ConfigError, match="no such file, and not one of demo-cpu"):
        find_profile("nowhere")
    path.write_text('{"format": "inflight profile 1"}')
    with pytest.raises(ConfigError, match=r"not a profile: .*inflight calibrate writes one"):
        find_profile(str(path))
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(PROFILE, format="inflight profile 9")))
    with pytest.raises(ConfigError, match="'inflight profile 9', this version reads 'inflight profile 1'"):
        find_profile(str(path))


@pytest.mark.parametrize("name", ["demo-cpu", "llama-60m-cpu"])
def test_shipped_profiles_can_be_used_and_say_where_they_come_from(name):
    assert name in shipped_profiles()
    profile = find_profile(name)
    assert profile.name == name
    assert profile.machine
    assert profile.versions["torch"]
    assert profile.date >= "2026-11-20"
    assert profile.fit.batches > 100
    assert profile.config({}).max_num_seqs > 0


def test_the_pool_follows_the_options():
    assert PROFILE.blocks(PROFILE.config({})) == 512
    assert PROFILE.blocks(PROFILE.config({"block_size": 32})) == 256
    assert PROFILE.blocks(PROFILE.config({"kv_cache_memory": "64KiB"})) == 64
    assert PROFILE.blocks(PROFILE.config({"num_gpu_blocks_override": 7})) == 7
