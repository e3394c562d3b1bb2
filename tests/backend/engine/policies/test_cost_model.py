"""The cost model of a step: what it counts, what it finds again, and what it is not fooled by."""

from __future__ import annotations

import random

import pytest

from inflight.engine.policies.cost_model import OnlineStepCost, StepCost, StepLoad, prefill_pairs, step_load
from inflight.engine.step import SchedulerOutput

TRUE = StepCost(0.004, 200e-6, 0.2e-6, 0.001, 60e-6, 5e-9)


def load(prefill: int = 0, computed: int = 0, decodes: int = 0, context: int = 0) -> StepLoad:
    """A step with one chunk of a prompt and decodes of `context` tokens each."""
    decoding = StepLoad(decodes, decodes * context)
    return decoding.with_prefill(computed, prefill) if prefill else decoding


DESIGN = [
    load(prefill, computed, decodes, context)
    for prefill, computed in ((0, 0), (32, 0), (128, 512), (512, 0), (512, 1536))
    for decodes, context in ((1, 16), (8, 64), (8, 1024), (32, 256))
]


def test_a_step_s_load_is_what_its_rows_compute():
    out = SchedulerOutput([0, 1, 2], [1, 4, 5], [6, 0, 2], num_tokens=10)
    # the decode reads 7 tokens; 1 + 2 + 3 + 4 pairs of the first chunk, 3 + 4 + 5 + 6 + 7 of the second
    assert step_load(out) == StepLoad(1, 7, 2, 9, 10 + 25)


@pytest.mark.parametrize("computed", [0, 5])
def test_pairs_are_those_of_causal_attention(computed):
    assert prefill_pairs(computed, 4) == sum(computed + i for i in range(1, 5))


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
    slow = StepCost(*(2 * getattr(TRUE, name) for name in TRUE.__struct_fields__))
    observe(model, 600, slow, rng)
    assert worst(model, slow) < 0.15


def test_hiccups_do_not_move_it():
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


def test_a_clock_that_did_not_move_is_no_step():
    model = OnlineStepCost()
    model.observe(DESIGN[0], 0.0)
    assert model.cost == StepCost()
