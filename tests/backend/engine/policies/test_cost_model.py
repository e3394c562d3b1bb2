"""The cost model of a step: its terms, its fit, and data that must not mislead it."""

from __future__ import annotations

import random

import msgspec
import pytest

from inflight.engine.policies.cost_model import OnlineStepCost, StepCost, StepLoad, prefill_pairs, step_load
from inflight.engine.step import SchedulerOutput

COEFFICIENTS = (0.004, 200e-6, 0.2e-6, 0.001, 60e-6, 5e-9)
TRUE = StepCost.linear(*COEFFICIENTS)


def load(prefill: int = 0, computed: int = 0, decodes: int = 0, context: int = 0) -> StepLoad:
    """A step with one chunk of a prompt and decodes of `context` tokens each."""
    decoding = StepLoad(decodes, decodes * context)
    return decoding.with_prefill(computed, prefill) if prefill else decoding


DESIGN = [
    load(prefill, computed, decodes, context)
    for prefill, computed in ((0, 0), (32, 0), (128, 512), (512, 0), (512, 1536))
    for decodes, context in ((1, 16), (8, 64), (8, 1024), (32, 256))
]


def test_the_load_of_a_step_is_the_work_of_its_rows():
    out = SchedulerOutput(num_scheduled_tokens=[1, 4, 5], num_computed_tokens=[6, 0, 2])
    # the decode reads 7 tokens; 1 + 2 + 3 + 4 pairs of the first chunk, 3 + 4 + 5 + 6 + 7 of the second
    assert step_load(out) == StepLoad(1, 7, 2, 9, 10 + 25)


@pytest.mark.parametrize("computed", [0, 5])
def test_attention_pairs_are_causal(computed):
    assert prefill_pairs(computed, 4) == sum(computed + i for i in range(1, 5))


def test_every_term_counts_its_quantity():
    cost = StepCost.linear(1.0, 10.0, 100.0, 1000.0, 1e4, 1e5)
    assert cost.seconds(StepLoad()) == 1.0
    assert cost.seconds(StepLoad(2, 7)) == 1.0 + 2 * 10 + 7 * 100
    assert cost.seconds(StepLoad(2, 7, 1, 3, 6)) == 1.0 + 3 * 10 + 7 * 100 + 1000 + 3 * 1e4 + 6 * 1e5


def test_the_curve_is_straight_between_its_knots_and_continues_beyond_them():
    cost = StepCost(tokens=(2, 4, 8), seconds_at=(1.0, 2.0, 6.0))
    assert [cost.seconds(StepLoad(tokens)) for tokens in (1, 2, 3, 4, 6, 8, 10)] == [1, 1, 1.5, 2, 4, 6, 8]
    assert cost.seconds(StepLoad(1, 0, 1, 5)) == 4, "decodes and prompt tokens together"
    assert StepCost(tokens=(1,), seconds_at=(0.5,)).seconds(StepLoad(9)) == 0.5


def test_recomputing_costs_the_rise_of_the_curve_and_not_its_base():
    cost = StepCost(tokens=(1, 11), seconds_at=(5.0, 15.0), per_sequence=3.0, prefill_fixed=7.0, per_attention_pair=0.5)
    assert cost.recompute_seconds(2, 8) == 5.0 + 0.5 * prefill_pairs(2, 6)


def test_a_cost_survives_json():
    cost = StepCost(tokens=(1, 64), seconds_at=(0.001, 0.01), per_attention_pair=5e-9)
    assert msgspec.json.decode(msgspec.json.encode(cost), type=StepCost) == cost


def observe(model: OnlineStepCost, steps: int, true: StepCost, rng: random.Random, noise: float = 0.05) -> None:
    for _ in range(steps):
        step = rng.choice(DESIGN)
        model.observe(step, true.seconds(step) * (1 + rng.uniform(-noise, noise)))


def worst(model: OnlineStepCost, true: StepCost) -> float:
    return max(abs(model.cost.seconds(step) / true.seconds(step) - 1) for step in DESIGN)


def test_the_online_fit_converges_and_follows_a_machine_that_slows_down():
    rng, model = random.Random(1), OnlineStepCost()
    observe(model, 200, TRUE, rng)
    assert worst(model, TRUE) < 0.1
    slow = StepCost.linear(*(2 * coefficient for coefficient in COEFFICIENTS))
    observe(model, 600, slow, rng)
    assert worst(model, slow) < 0.15


def test_outliers_do_not_move_the_fit():
    rng, model = random.Random(2), OnlineStepCost()
    observe(model, 200, TRUE, rng)
    for _ in range(40):
        observe(model, 9, TRUE, rng)
        step = rng.choice(DESIGN)
        model.observe(step, 20 * TRUE.seconds(step))
    assert worst(model, TRUE) < 0.25


def test_decoding_for_hours_does_not_make_prompts_free():
    rng, model = random.Random(3), OnlineStepCost()
    observe(model, 200, TRUE, rng)
    decode = load(decodes=8, context=300)
    for _ in range(20_000):
        model.observe(decode, TRUE.seconds(decode))
    chunk = load(512, 0, 8, 300)
    assert model.cost.seconds(chunk) == pytest.approx(TRUE.seconds(chunk), rel=0.15)


def test_a_step_that_took_no_time_is_ignored():
    model = OnlineStepCost()
    model.observe(DESIGN[0], 0.0)
    assert model.cost == StepCost()
