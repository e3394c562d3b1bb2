"""The budget of encoders: whole prompts in each step, under any other policy, and the first in line in every one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_rig import Info, PagedHashRunner, make_core
from hypothesis import given
from hypothesis import strategies as st
from pooled import pooled

from inflight.engine.integrity import check_core
from inflight.engine.policies.whole_prompts import WholePrompts
from inflight.engine.step import SchedulerOutput, StepOutput

STEP = 70  # tokens; the longest prompt has 64
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "async_scheduling": st.booleans(),
    "scheduling_policy": st.sampled_from(["fcfs", "priority", "sjf", "edf"]),
    "admission": st.sampled_from(["free_blocks", "predicted_peak"]),
    "tenants": st.sampled_from([{}, {"a": {}}]),
    "enable_prefix_caching": st.booleans(),
    "max_num_partial_prefills": st.sampled_from([1, 2]),
    "itl_target_ms": st.sampled_from([None, 5.0]),
}


class WholeRunner(PagedHashRunner):
    """Fails for a part of a prompt."""

    steps: list[list[int]]

    def execute(self, out: SchedulerOutput, prepared: None) -> StepOutput:
        for new in out.new_rows:
            self.tokens[new.slot] = [0] * new.num_prompt_tokens
        lengths = [len(self.tokens[slot]) for slot in out.slots]
        assert (out.num_computed_tokens, out.num_scheduled_tokens) == ([0] * len(lengths), lengths), (
            "a part of a prompt"
        )
        assert sum(lengths) <= STEP and all(out.samples)
        self.steps.append([new.request_id for new in out.new_rows])
        step = StepOutput(token_ids=[0] * len(lengths))
        step.pooled = dict.fromkeys(range(len(lengths)), b"vector")
        return step


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.one_of(st.none(), st.none(), st.integers(0, 6))), min_size=1, max_size=20
    ),
    st.sampled_from([1, 3, 8]),
    st.fixed_dictionaries(OPTIONS),
)
def test_prompts_are_computed_whole(
    arrivals: list[tuple[int, int | None]], seats: int, options: Mapping[str, Any]
) -> None:
    info = Info(num_blocks=seats * 16, whole_prompts=True)
    core = make_core(info, block_size=4, max_num_seqs=seats, max_num_batched_tokens=STEP, **options)
    core.runner = runner = WholeRunner(info, 4, seats)
    runner.steps = []
    for i, (length, _) in enumerate(arrivals):
        assert core.add_request(pooled(i, [i % 7] * length)) is None
    ended: set[int] = set()
    aborted: set[int] = set()
    for number in range(100):
        for i, (_, when) in enumerate(arrivals):
            if when == number and i not in ended:
                core.abort(i)
                aborted.add(i)
        if not core.has_work:
            break
        message = core.step()
        check_core(core)
        assert not message.failed
        ended |= {delta.request_id for delta in message.deltas}
    assert not core.has_work and core.pool.num_used == 0
    assert ended | aborted == set(range(len(arrivals))) and not ended & aborted
    assert core.pool.num_prefix_queries == 0
    if options["scheduling_policy"] == "fcfs" and not options["tenants"] and not aborted:
        left = set(range(len(arrivals)))
        for step in runner.steps:
            assert min(left) in step, "the first in line was passed over"
            left -= set(step)


def test_all_or_nothing() -> None:
    request: Any = None
    assert [WholePrompts().grant(request, 10, limit) for limit in (0, 9, 10, 11)] == [0, 0, 10, 10]
