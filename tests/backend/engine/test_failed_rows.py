"""A row with logits that are not finite fails its request; the rows beside it are not affected."""

from __future__ import annotations

from typing import Any

import pytest
from drafters import KINDS, HashDrafter
from engine_rig import VOCAB, Info, PagedHashRunner, add, expected_output, make_core
from hypothesis import given
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.engine.core import EngineCore
from inflight.engine.deltas import RequestFailed
from inflight.engine.integrity import check_core
from inflight.engine.messages import StepMessage
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.engine.step_trace import StepTrace

WHY = "the logits are not finite"
POISON = VOCAB - 1


class PoisonedRunner(PagedHashRunner):
    """A model whose weights have a NaN in the embedding of `POISON`: logits after that token are NaN.

    As a real runner it leaves some token in the slot, which a step that is launched already may read.
    """

    def execute(self, out: SchedulerOutput, prepared: None) -> StepOutput:
        step = super().execute(out, prepared)
        for row, slot in enumerate(out.slots):
            end = out.num_computed_tokens[row] + out.num_scheduled_tokens[row]
            if not out.samples[row]:
                continue
            run = step.token_runs.get(row, [step.token_ids[row]])
            start = end - len(out.draft_token_ids.get(row, ()))
            poisoned = next((k for k in range(len(run)) if POISON in self._read(slot, start + k)), None)
            if poisoned is not None:
                step.row_failures[row] = WHY
                step.token_runs.pop(row, None)
                step.token_ids[row] = -1
        return step


def poisoned_core(info: Info | None = None, **options: Any) -> EngineCore:
    core = make_core(info or Info(), **options)
    core.runner = PoisonedRunner(core.info, core.config.block_size, core.config.max_num_seqs)
    return core


class Seen:
    """The messages that the frontend receives."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.reasons: dict[tuple[int, int], str] = {}
        self.failed: dict[int, RequestFailed] = {}

    def take(self, message: StepMessage) -> None:
        for delta in message.deltas:
            assert delta.request_id not in self.failed, "a failed request continued"
            assert min(delta.token_ids, default=0) >= 0
            self.outputs.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.reasons[delta.request_id, delta.index] = delta.finish_reason
        for failure in message.failed:
            assert failure.request_id not in self.failed, "a request failed twice"
            self.failed[failure.request_id] = failure

    def run(self, core: EngineCore) -> None:
        for _ in range(20_000):
            if not core.has_work:
                check_core(core)
                return
            self.take(core.step())
            check_core(core)
        raise AssertionError("still busy")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", [None, HashDrafter(KINDS[0], 3)])
def test_the_others_get_their_tokens_and_the_blocks_are_freed(overlap: bool, drafter: HashDrafter | None) -> None:
    core, seen = poisoned_core(async_scheduling=overlap), Seen()
    core.scheduler.policies.drafter = drafter
    for request_id, prompt in enumerate([[1] * 5, [2, POISON, 2], [3] * 5]):
        params = add(core, request_id, prompt, max_tokens=6, ignore_eos=True)
    seen.run(core)
    assert seen.failed == {1: RequestFailed(1, "INTERNAL", WHY)}
    assert not [key for key in seen.outputs if key[0] == 1]
    for request_id, prompt in ((0, [1] * 5), (2, [3] * 5)):
        tokens, reason = expected_output(prompt, params, core.info)
        if POISON not in tokens:
            assert (seen.outputs[request_id, 0], seen.reasons[request_id, 0]) == (tokens, reason)
    assert core.pool.num_used == 0


def test_all_sequences_of_a_request_fail_with_one_message() -> None:
    core, seen = poisoned_core(), Seen()
    add(core, 1, [1, POISON], n=3, max_tokens=9, ignore_eos=True)
    seen.run(core)
    assert list(seen.failed) == [1]
    assert not seen.outputs


def test_no_request_finds_its_blocks_as_a_prefix() -> None:
    """Nor the blocks of its earlier chunks: their logits were not checked."""
    prompt = [1, POISON, *range(2, 20)]
    core, seen = poisoned_core(block_size=4, max_num_batched_tokens=8), Seen()
    add(core, 1, prompt, max_tokens=4, ignore_eos=True)
    seen.run(core)
    assert list(seen.failed) == [1]
    assert not core.pool._block_of
    add(core, 2, prompt, max_tokens=4, ignore_eos=True)
    seen.run(core)
    assert core.pool.num_prefix_hits == 0


def test_the_trace_has_its_end() -> None:
    trace = StepTrace(EngineConfig(model="hash", step_trace=True), 64)
    core, seen = poisoned_core(listeners=[trace]), Seen()
    add(core, 1, [1, POISON], max_tokens=5, ignore_eos=True)
    seen.run(core)
    assert trace.snapshot().requests[0].finish_reason == "abort"


loads = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 4, 16]),
        "max_num_batched_tokens": st.sampled_from([1, 7, 64]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "async_scheduling": st.booleans(),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    }
)
arrivals = st.tuples(
    st.integers(0, 4),  # steps before it arrives
    st.lists(st.sampled_from([0, 1, 2, POISON]), min_size=1, max_size=40),
    st.integers(1, 20),  # max_tokens
    st.integers(1, 3),  # n
    st.integers(0, 2),  # priority
)


@given(
    loads,
    st.lists(arrivals, min_size=1, max_size=8),
    st.sampled_from([64, 256]),
    st.one_of(st.none(), st.builds(HashDrafter, st.sampled_from(KINDS), st.integers(1, 9))),
)
def test_exactly_the_requests_with_the_token_fail(
    options: dict[str, Any], load: list[Any], slots: int, drafter: HashDrafter | None
) -> None:
    info = Info(num_blocks=slots // options["block_size"], num_host_blocks=20)
    core, seen = poisoned_core(info, swap_space="1MiB", **options), Seen()
    core.scheduler.policies.drafter = drafter
    wanted: dict[int, tuple[list[int], list[int], str, int]] = {}
    for request_id, (gap, prompt, max_tokens, n, priority) in enumerate(load):
        for _ in range(gap):
            seen.take(core.step())
            check_core(core)
        fields = {"priority": priority, "arrival": float(request_id)}
        params = add(core, request_id, prompt, fields, max_tokens=max_tokens, n=n, ignore_eos=True)
        wanted[request_id] = prompt, *expected_output(prompt, params, info), n
    seen.run(core)
    for request_id, (prompt, tokens, reason, n) in wanted.items():
        fails = POISON in [*prompt, *tokens[:-1]]
        assert fails == (request_id in seen.failed)
        for index in range(n):
            got = seen.outputs.get((request_id, index), [])
            if fails:
                assert got == tokens[: len(got)]
            else:
                assert (got, seen.reasons[request_id, index]) == (tokens, reason)
