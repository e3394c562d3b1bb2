"""The share of short prompts in the steps of long ones that came before them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from engine_rig import Info, add, collect, expected_output, make_core, run_until_idle
from hypothesis import given
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.engine.core import EngineCore
from inflight.engine.events import EngineListener
from inflight.engine.policies.selection import make_policies
from inflight.engine.policies.short_prompts import ShortPromptsFirst
from inflight.engine.policies.urgency import OutrankingFirst
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput

INFO = Info(max_model_len=400, num_blocks=4000, eos_token_ids=[])
LONG = 100


class Steps(EngineListener):
    """Counts steps, and prompt tokens of each request by step."""

    def __init__(self, **options: Any) -> None:
        defaults = {"max_num_batched_tokens": 20, "block_size": 4, "enable_prefix_caching": False}
        self.core: EngineCore = make_core(INFO, listeners=[self], **{**defaults, **options})
        self.num_steps = 0
        self.last: SchedulerOutput | None = None
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.reasons: dict[tuple[int, int], str] = {}
        self.first_step: dict[int, int] = {}  # with a token of the request

    def step_made(self, out: SchedulerOutput) -> None:
        self.last = out

    def step(self) -> None:
        self.num_steps += 1
        collect(self.core, self.outputs, self.reasons)
        for request_id, _ in self.outputs:
            self.first_step.setdefault(request_id, self.num_steps)

    def steps_until(self, request_id: int) -> int:
        """Steps from now to the request's first token."""
        before = self.num_steps
        while request_id not in self.first_step:
            self.step()
        return self.num_steps - before


def prompt(number: int, length: int) -> list[int]:
    return [number % 50] * length


def long_prompts(steps: Steps, count: int) -> None:
    for number in range(count):
        add(steps.core, number, prompt(number, LONG), max_tokens=5)
    steps.step()


@pytest.mark.parametrize(("share", "expected"), [(0.25, 1), (0, 41)])
def test_a_short_prompt_does_not_wait_for_the_long_ones_before_it(share: float, expected: int) -> None:
    steps = Steps(short_prompt_share=share)
    long_prompts(steps, 8)
    add(steps.core, 99, prompt(9, 3), max_tokens=5)
    assert steps.steps_until(99) == expected
    steps.steps_until(7)
    assert steps.num_steps <= 8 * LONG / 20 + 3, "the last long one waits for no more than these few tokens"


def test_a_flood_of_short_prompts_gets_its_share_and_the_shortest_are_first() -> None:
    steps = Steps(max_num_seqs=1000)
    add(steps.core, 0, prompt(0, 380), max_tokens=5)
    steps.step()
    for number in range(200):
        add(steps.core, 100 + number, prompt(number, 5), max_tokens=1)
    add(steps.core, 99, prompt(9, 3), max_tokens=1)
    assert steps.steps_until(99) == 1
    steps.steps_until(0)
    assert steps.num_steps <= (380 / 0.75 + 20) / 20 + 2
    num_short = len(steps.first_step) - 1
    assert (380 / 3) / 5 - 1 <= num_short <= (20 + 380 / 3) / 5 + 4, "what its last step had left, too"


def test_a_prompt_that_no_step_has_room_for_waits_in_line() -> None:
    steps = Steps()
    long_prompts(steps, 1)
    add(steps.core, 98, prompt(9, 20), max_tokens=5)  # the credit covers it, but the long one keeps one of 20 tokens
    steps.step()
    assert len(steps.core.scheduler.running) == 1
    add(steps.core, 99, prompt(9, 19), max_tokens=5)
    assert steps.steps_until(99) == 1


def test_a_prompt_that_the_prefix_cache_has_is_short() -> None:
    steps = Steps(enable_prefix_caching=True, max_num_batched_tokens=40)
    add(steps.core, 50, prompt(9, 40), max_tokens=1)
    steps.steps_until(50)
    long_prompts(steps, 4)
    add(steps.core, 98, prompt(8, 3), max_tokens=5)
    add(steps.core, 99, [*prompt(9, 36), 1, 2], max_tokens=5)
    steps.step()
    assert {98, 99} <= steps.first_step.keys(), "two tokens to compute, of the 37 that were left"


def test_the_next_in_order_keeps_a_slot() -> None:
    steps = Steps(max_num_seqs=4)
    long_prompts(steps, 2)
    for number in range(3):
        add(steps.core, 10 + number, prompt(number, 1), max_tokens=300)
    steps.step()
    assert len(steps.core.scheduler.running) == 3, "one slot is left to the second long prompt"
    steps.steps_until(12)
    assert steps.first_step[1] <= steps.first_step[12]


def test_prompts_with_log_probabilities_pay_their_weight() -> None:
    steps = Steps(max_num_batched_tokens=40)
    long_prompts(steps, 2)
    add(steps.core, 98, prompt(9, 8), max_tokens=5, prompt_logprobs=100)  # takes 33 of 40 tokens of credit
    add(steps.core, 99, prompt(9, 10), max_tokens=5)
    steps.step()
    assert 98 in steps.first_step
    assert 99 not in steps.first_step


def test_among_tenants_the_fair_queue_says_who_goes_ahead() -> None:
    steps = Steps(tenants={"a": {}, "b": {}})
    for number in range(8):
        add(steps.core, number, prompt(number, LONG), {"tenant": "a"}, max_tokens=5)
    steps.step()
    add(steps.core, 98, prompt(8, 3), {"tenant": "a"}, max_tokens=5)
    add(steps.core, 99, prompt(9, 3), {"tenant": "b"}, max_tokens=5)
    assert steps.steps_until(99) == 1
    assert 98 not in steps.first_step, "it is not next of its tenant"


def test_the_option_and_the_order_choose() -> None:
    def urgency(**options: Any) -> object:
        return make_policies(EngineConfig(model="none", **options)).urgency

    assert isinstance(urgency(), ShortPromptsFirst)
    assert urgency(short_prompt_share=0) is None
    assert urgency(scheduling_policy="sjf") is None
    assert isinstance(urgency(scheduling_policy="priority"), OutrankingFirst)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps before it arrives
        st.one_of(st.integers(1, 6), st.integers(1, 120)),  # length of its prompt
        st.integers(1, 6),  # output tokens
        st.sampled_from([None, None, None, 3]),  # prompt_logprobs
    ),
    min_size=1,
    max_size=16,
)


@given(arrivals, st.sampled_from([0.1, 0.25, 0.5, 0.9]), st.sampled_from([20, 35]))
def test_no_prompt_starves_no_token_of_a_step_is_lost_and_no_output_changes(
    requests: list[tuple[int, int, int, int | None]], share: float, budget: int
) -> None:
    """With slots and blocks for all.  The bound is that of `policies/short_prompts.py`."""
    steps = Steps(short_prompt_share=share, max_num_batched_tokens=budget, max_num_seqs=64)
    scheduler = steps.core.scheduler
    latest: dict[int, float] = {}  # request -> the step by which it has a token

    def step() -> None:
        steps.step()
        left = len(scheduler.waiting) + sum(r.num_total_tokens - r.num_computed_tokens > 1 for r in scheduler.running)
        assert not left or steps.last is None or steps.last.num_tokens == budget or weighs

    weighs = any(shown for *_, shown in requests)  # then a step's tokens count for more
    for number, (gap, length, output, shown) in enumerate(requests):
        for _ in range(gap):
            step()
        add(steps.core, number, prompt(number, length), max_tokens=output, prompt_logprobs=shown)
        line = [*scheduler.running, *scheduler.waiting]
        tokens = sum(r.num_total_tokens - r.num_computed_tokens for r in line if r.num_output_tokens == 0)
        if not weighs:
            latest[number] = steps.num_steps + math.ceil((tokens / (1 - share) + budget) / (budget - 16)) + 2
    while scheduler.has_work:
        step()
    run_until_idle(steps.core, steps.outputs, steps.reasons)
    for number, (_, length, output, _) in enumerate(requests):
        wanted = expected_output(prompt(number, length), SamplingParams(max_tokens=output), INFO)
        assert steps.outputs[number, 0] == wanted[0]
    assert all(steps.first_step[number] <= last for number, last in latest.items())
