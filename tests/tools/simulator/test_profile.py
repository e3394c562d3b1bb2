"""The fit of a calibration and the file that keeps it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from simulated import PROFILE

from inflight.config import ConfigError
from inflight.engine.policies.cost_model import StepCost, StepLoad
from inflight_tools.least_squares import nonnegative_least_squares
from inflight_tools.simulator.fit import fit_cost
from inflight_tools.simulator.profile import find_profile, shipped_profiles

LOADS = [
    StepLoad(decodes, decodes * context).with_prefill(computed, chunk)
    if chunk
    else StepLoad(decodes, decodes * context)
    for decodes, context in ((1, 16), (4, 100), (16, 20), (17, 900), (32, 200), (64, 50))
    for computed, chunk in ((0, 0), (0, 64), (512, 256), (1024, 512))
]


def true_seconds(load: StepLoad) -> float:
    """A kernel that changes at 16 tokens: a jump, as seen on CPUs."""
    tokens = load.tokens
    product = 0.001 if tokens <= 16 else 0.004 + 1e-4 * (tokens - 17)
    return product + 2e-5 * load.sequences + 1e-7 * load.context_tokens + 5e-9 * load.attention_pairs


def test_the_fit_recovers_a_curve_with_a_jump():
    found = fit_cost([(load, true_seconds(load)) for load in LOADS])
    for load in LOADS:
        assert found.seconds(load) == pytest.approx(true_seconds(load), rel=0.05)
    beyond = StepLoad(64, 6400).with_prefill(0, 2048)
    assert found.seconds(beyond) == pytest.approx(true_seconds(beyond), rel=0.1)
    assert list(found.seconds_at) == sorted(found.seconds_at), "more tokens never cost less"


def test_a_step_that_the_machine_delayed_counts_in_full():
    """Means remain means: half of the steps take 1 ms, half 3 ms."""
    found = fit_cost([(StepLoad(4, 40), 0.001), (StepLoad(4, 40), 0.003)] * 20)
    assert found.seconds(StepLoad(4, 40)) == pytest.approx(0.002, rel=0.01)


def test_least_squares_are_never_negative():
    rng = np.random.default_rng(3)
    for _ in range(20):
        design, truth = rng.normal(size=(30, 6)), rng.normal(size=6)
        target = design @ truth + 0.1 * rng.normal(size=30)
        found = nonnegative_least_squares(design, target)
        gradient = design.T @ (target - design @ found)
        assert (found >= 0).all()
        # Karush-Kuhn-Tucker: neither raising a zero nor moving another coefficient reduces the error.
        assert gradient[found == 0].max(initial=-1.0) <= 1e-6
        assert np.abs(gradient[found > 0]).max(initial=0.0) <= 1e-6


def test_a_profile_is_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(PROFILE))
    assert find_profile(str(path)) == PROFILE
    with pytest.raises(ConfigError, match="no such file, and not one of demo-cpu"):
        find_profile("nowhere")
    path.write_text('{"format": "inflight profile 1"}')
    with pytest.raises(ConfigError, match=r"not a profile: .*create one with inflight calibrate"):
        find_profile(str(path))
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(PROFILE), "host": StepCost(tokens=(1, 2))}))
    with pytest.raises(ConfigError, match="increasing `tokens` and as many `seconds_at`"):
        find_profile(str(path))
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(PROFILE, format="inflight profile 9")))
    with pytest.raises(ConfigError, match="'inflight profile 9', but this version reads 'inflight profile 1'"):
        find_profile(str(path))


@pytest.mark.parametrize("name", ["demo-cpu", "llama-60m-cpu"])
def test_a_shipped_profile_loads_and_says_where_it_comes_from(name):
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
