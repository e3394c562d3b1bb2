"""A step that fails for lack of memory ends only its requests; no request reads the KV that it did not write."""

from __future__ import annotations

from typing import Any

import pytest
from drafters import KINDS, HashDrafter
from engine_rig import Info, PagedHashRunner, add, expected_output, make_core
from hypothesis import given
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.engine.core import EngineCore
from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.integrity import check_core
from inflight.engine.messages import StepMessage
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.engine.step_trace import StepTrace

WHY = "the step ran out of memory"
GARBAGE = 255  # no token, but `next_token` hashes it


class FailingRunner(PagedHashRunner):
    """Fails the steps with the numbers in `failing`, after their copies are made and their rows are in their slots.

    Attributes:
        rows: request ids of each failed step.
    """

    def __init__(self, info: Info, config: Any, failing: set[int]) -> None:
        super().__init__(info, config.block_size, config.max_num_seqs)
        self.failing = failing
        self.num_executed = 0
        self.rows: list[set[int]] = []
        self._request_ids: dict[int, int] = {}

    def execute(self, out: SchedulerOutput, prepared: None) -> StepOutput:
        self._request_ids.update((row.slot, row.request_id) for row in out.new_rows)
        self.num_executed += 1
        if self.num_executed - 1 not in self.failing:
            return super().execute(out, prepared)
        self._apply(out)
        for row, slot in enumerate(out.slots):
            first, end = out.num_computed_tokens[row], out.num_computed_tokens[row] + out.num_scheduled_tokens[row]
            for position in range(first, end):
                block = self.tables[slot][position // self.block_size]
                self.pool[block][position % self.block_size] = GARBAGE
            self.tokens[slot] += [GARBAGE] * (end + 1 - len(self.tokens[slot]))
        self.rows.append({self._request_ids[slot] for slot in out.slots})
        now = self.clock()
        return StepOutput(started=now, ended=now, failure=WHY)


def failing_core(failing: set[int], info: Info | None = None, **options: Any) -> EngineCore:
    core = make_core(info or Info(), **options)
    core.runner = FailingRunner(core.info, core.config, failing)
    return core


class Seen:
    """The messages that the frontend receives."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.reasons: dict[tuple[int, int], str] = {}
        self.failed: dict[int, str] = {}

    def take(self, message: StepMessage) -> None:
        for delta in message.deltas:
            key = delta.request_id, delta.index
            assert delta.request_id not in self.failed, "a failed request continued"
            assert key not in self.reasons, "a sequence continued after its end"
            self.outputs.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.reasons[key] = delta.finish_reason
        for failure in message.failed:
            assert failure.request_id not in self.failed, "a request failed twice"
            assert failure.code == "UNAVAILABLE"
            self.failed[failure.request_id] = failure.message

    def run(self, core: EngineCore, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not core.has_work:
                check_core(core)
                return
            self.take(core.step())
            check_core(core)
        raise AssertionError(f"still busy after {limit} steps")


@pytest.mark.parametrize("overlap", [False, True])
def test_the_requests_of_the_step_fail_and_the_engine_continues(overlap: bool) -> None:
    core, seen = failing_core({2}, async_scheduling=overlap, max_num_seqs=2), Seen()
    for request_id in range(3):
        params = add(core, request_id, [request_id + 1] * 5, max_tokens=6, ignore_eos=True)
    seen.run(core)
    assert seen.failed == {0: WHY, 1: WHY}
    assert all(len(seen.outputs[request_id, 0]) == 2 for request_id in range(2))
    assert seen.outputs[2, 0] == expected_output([3] * 5, params, core.info)[0]


def test_all_sequences_of_a_request_fail_with_one_message() -> None:
    core, seen = failing_core({3}), Seen()
    add(core, 1, [1, 2, 3], n=3, max_tokens=9, ignore_eos=True)
    seen.run(core)
    assert seen.failed == {1: WHY}
    assert not seen.reasons


def test_the_metrics_count_the_freed_blocks() -> None:
    core = failing_core({0})
    add(core, 1, [1] * 30, max_tokens=9)
    message = core.step()
    assert [failure.request_id for failure in message.failed] == [1]
    assert (message.stats.blocks_used, message.stats.running) == (0, 0)
    assert not core.has_work


def test_a_failed_prompt_leaves_no_prefix() -> None:
    """Its blocks can be found from the moment when their step is scheduled."""
    prompt = list(range(20))
    core, seen = failing_core({1}, block_size=4, max_num_batched_tokens=8), Seen()
    add(core, 1, prompt, max_tokens=4, ignore_eos=True)
    seen.run(core)
    assert seen.failed == {1: WHY}
    params = add(core, 2, prompt, max_tokens=4, ignore_eos=True)
    seen.run(core)
    assert seen.outputs[2, 0] == expected_output(prompt, params, core.info)[0]
    assert core.pool.num_prefix_hits == 8, "the blocks of the previous step are still found"


def test_a_request_launched_ahead_on_a_failed_prefix_fails_too() -> None:
    prompt = list(range(20))
    core, seen = failing_core({0}, block_size=4, async_scheduling=True, max_num_batched_tokens=20), Seen()
    add(core, 1, prompt, max_tokens=4, ignore_eos=True)
    add(core, 2, prompt, max_tokens=4, ignore_eos=True)
    add(core, 3, [7] * 6, max_tokens=4, ignore_eos=True)
    seen.run(core)
    assert seen.failed == {1: WHY, 2: WHY}
    assert core.runner.rows == [{1}]
    params = add(core, 4, prompt, max_tokens=4, ignore_eos=True)
    seen.run(core)
    for request_id, tokens in ((3, [7] * 6), (4, prompt)):
        assert seen.outputs[request_id, 0] == expected_output(tokens, params, core.info)[0]


def test_blocks_computed_after_a_failed_prefix_are_not_found_either() -> None:
    """Request 2 computes its own blocks after the blocks of request 1, in the step that is launched ahead."""
    core, seen = failing_core({0}, block_size=4, async_scheduling=True, max_num_batched_tokens=20), Seen()
    add(core, 1, list(range(20)), max_tokens=4, ignore_eos=True)
    add(core, 2, list(range(32)), max_tokens=4, ignore_eos=True)
    seen.run(core)
    assert seen.failed == {1: WHY, 2: WHY}
    assert not core.pool._block_of, "the runner of this test computes them correctly, a model would not"


def test_a_failed_step_teaches_the_policies_nothing() -> None:
    class Learner(EngineListener):
        def step_done(self, step: DoneStep) -> None:
            assert not step.result.failure
            learned.append(step)

    learned: list[DoneStep] = []
    core, seen = failing_core({1}, listeners=[Learner()]), Seen()
    add(core, 1, [1, 2, 3], max_tokens=5, ignore_eos=True)
    seen.run(core)
    assert len(learned) == 1


def test_the_trace_has_the_failed_step() -> None:
    ring = StepTrace(EngineConfig(model="hash", step_trace=True), 64)
    core, seen = failing_core({0}, listeners=[ring], async_scheduling=True), Seen()
    add(core, 1, [1, 2, 3], max_tokens=5, ignore_eos=True)
    seen.run(core)
    trace = ring.snapshot()
    assert [step.ended for step in trace.steps] == [[trace.requests[0].key], []]
    assert trace.requests[0].finish_reason == "abort"


loads = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 16]),
        "max_num_batched_tokens": st.sampled_from([1, 7, 16, 64]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "async_scheduling": st.booleans(),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    }
)
arrivals = st.tuples(
    st.integers(0, 4),  # steps before it arrives
    st.lists(st.integers(0, 2), min_size=1, max_size=40),  # few distinct ids: prefixes collide often
    st.integers(1, 20),  # max_tokens
    st.integers(1, 3),  # n
    st.integers(0, 2),  # priority
    st.one_of(st.none(), st.integers(0, 8)),  # steps until it is aborted
)


@given(
    loads,
    st.lists(arrivals, min_size=1, max_size=10),
    st.sets(st.integers(0, 60)),
    st.sampled_from([64, 100, 256]),
    st.one_of(st.none(), st.builds(HashDrafter, st.sampled_from(KINDS), st.integers(1, 9))),
)
def test_the_other_requests_get_exactly_their_tokens(
    options: dict[str, Any], load: list[Any], failing: set[int], slots: int, drafter: HashDrafter | None
) -> None:
    info = Info(num_blocks=slots // options["block_size"], num_host_blocks=20)
    core, seen = failing_core(failing, info, swap_space="1MiB", **options), Seen()
    core.scheduler.policies.drafter = drafter
    expected: dict[tuple[int, int], tuple[list[int], str]] = {}
    aborts: dict[int, int] = {}
    step = 0
    for request_id, (gap, prompt, max_tokens, n, priority, abort_after) in enumerate(load):
        for _ in range(gap):
            seen.take(core.step())
            check_core(core)
            step += 1
            for victim in [victim for victim, due in aborts.items() if due == step]:
                core.abort(victim)
        fields = {"priority": priority, "arrival": float(step)}
        params = add(core, request_id, prompt, fields, max_tokens=max_tokens, n=n, ignore_eos=True)
        expected.update({(request_id, index): expected_output(prompt, params, info) for index in range(n)})
        if abort_after is not None:
            aborts[request_id] = step + abort_after
    for victim in aborts:
        core.abort(victim)
    seen.run(core)
    runner = core.runner
    assert isinstance(runner, FailingRunner)
    if not options["async_scheduling"]:
        assert seen.failed.keys() <= set().union(*runner.rows), "a request failed that was in no failed step"
    for key, (tokens, reason) in expected.items():
        got = seen.outputs.get(key, [])
        if key[0] in seen.failed or (key[0] in aborts and key not in seen.reasons):
            assert got == tokens[: len(got)]
        else:
            assert (got, seen.reasons[key]) == (tokens, reason)
