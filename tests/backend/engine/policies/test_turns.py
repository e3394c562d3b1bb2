"""The rows that one request with many sequences can add to the steps of others."""

from __future__ import annotations

from collections import Counter

from engine_rig import Info, add, collect, done_step, expected_output, make_core, run_until_idle
from hypothesis import given
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.engine.policies.cost_model import StepCost, step_load
from inflight.engine.policies.defaults import EveryStep
from inflight.engine.policies.row_shares import RowShares
from inflight.engine.policies.selection import make_policies
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput


def sequences(request_id: int, count: int) -> list[Request]:
    return [Request(request_id, [1], SamplingParams(), index=index) for index in range(count)]


def rows(widths: list[int], least: int = 4) -> list[int]:
    """Rows of each request in a step."""
    running = [request for number, width in enumerate(widths) for request in sequences(number, width)]
    taken = Counter(request.request_id for request in RowShares(least).take(running))
    return [taken[number] for number in range(len(widths))]


def test_only_a_request_wider_than_the_others_together_is_limited() -> None:
    assert rows([48]) == [48], "alone it has them all"
    assert rows([48, 1]) == [4, 1]
    assert rows([1, 48, 1, 1]) == [1, 6, 1, 1], "twice the three others"
    assert rows([48, 48]) == [48, 48]
    assert rows([48, 48, 48, 1]) == [4, 10, 30, 1]
    assert rows([1] * 40 + [48]) == [1] * 40 + [48]
    assert rows([4, 3, 2]) == [4, 3, 2]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 20))
def test_each_sequence_is_in_a_step_soon_and_in_the_order_of_running(widths: list[int], least: int) -> None:
    turns = RowShares(least)
    running = [request for number, width in enumerate(widths) for request in sequences(number, width)]
    last = dict.fromkeys(running, 0)
    for step in range(1, 100):
        taken = turns.take(running)
        assert taken == [request for request in running if request in set(taken)]
        count = Counter(request.request_id for request in taken)
        narrower = 0
        for number in sorted(count, key=lambda number: widths[number]):
            assert count[number] == widths[number] or not narrower or count[number] >= min(widths[number], least)
            assert count[number] <= max(least, 2 * narrower) or not narrower
            narrower += count[number]
        for request in taken:
            last[request] = step
        assert all(step - last[request] <= -(-max(widths) // least) for request in running)


def test_places_of_a_request_whose_sequences_end_stay_in_turn() -> None:
    turns = RowShares(2)
    wide, narrow = sequences(0, 5), sequences(1, 1)
    seen = []
    for _ in range(5):
        taken = turns.take([*wide, *narrow])
        assert narrow[0] in taken
        seen.append([request.index for request in taken if request.request_id == 0])
        wide = wide[:-1]
    assert seen == [[0, 1], [2, 3], [1, 2], [0, 1], [0]]


def test_a_neighbour_of_a_wide_request_gets_a_token_each_step_and_all_get_the_same_tokens() -> None:
    info = Info(num_blocks=600, eos_token_ids=[])
    core = make_core(info, max_num_seqs=64, shared_step_rows=4)
    outputs: dict[tuple[int, int], list[int]] = {}
    reasons: dict[tuple[int, int], str] = {}
    add(core, 0, [1, 2], max_tokens=30, n=24)
    for _ in range(4):
        collect(core, outputs, reasons)
    assert len(outputs[0, 23]) > 1, "alone it is not limited"
    params = add(core, 1, [3, 4], max_tokens=20)
    collect(core, outputs, reasons)
    for step in range(2, 21):
        collect(core, outputs, reasons)
        assert core.runner.batch_sizes[-1] == 5
        assert len(outputs[1, 0]) == step
    run_until_idle(core, outputs, reasons)
    assert outputs[1, 0] == expected_output([3, 4], params, info)[0]
    whole = expected_output([1, 2], SamplingParams(max_tokens=30), info)[0]
    assert all(outputs[0, index] == whole for index in range(24))


def learn(turns: RowShares, running: list[Request], cost: StepCost, steps: int = 60) -> Counter[int]:
    """Rows of each request in the last of some steps on a device with this cost."""
    for _ in range(steps):
        taken = turns.take(running)
        out = SchedulerOutput()
        for slot, request in enumerate(taken):
            out.append(slot, 1, request.num_tokens - 1, samples=True)
        turns.step_done(done_step(out, cost.seconds(step_load(out))))
    return Counter(request.request_id for request in taken)


DEAR = StepCost.linear(fixed=0.004, per_sequence=0.001)
FREE = StepCost.linear(fixed=0.004)


def test_rows_that_are_dear_are_fewer() -> None:
    narrow, wide = sequences(0, 1), sequences(1, 48)
    turns = RowShares(32)
    assert learn(turns, [*narrow, *wide], DEAR, steps=1)[1] == 32, "nothing is known yet"
    rows = learn(turns, [*narrow, *wide], DEAR)[1]
    assert 11 <= rows <= 14, "3 x (4 + 2) ms = (4 + 14) ms with one row of it, 13 rows"
    assert learn(turns, wide, DEAR)[1] == 48, "alone it has them all"
    assert learn(turns, [*sequences(2, 10), *wide], DEAR)[1] >= 20, "never under twice the others"


def test_rows_that_cost_nothing_are_as_many_as_allowed() -> None:
    turns = RowShares(32)
    learn(turns, sequences(1, 48), FREE)  # steps of one size do not tell what a row costs
    assert learn(turns, [*sequences(0, 1), *sequences(1, 48)], FREE)[1] == 32


def test_steps_without_several_sequences_teach_nothing() -> None:
    turns = RowShares(32)
    learn(turns, [*sequences(0, 1), *sequences(1, 1), *sequences(2, 1), *sequences(3, 1), *sequences(4, 1)], DEAR)
    assert learn(turns, [*sequences(0, 1), *sequences(1, 48)], DEAR, steps=1)[1] == 32


def test_the_option_chooses() -> None:
    policies = make_policies(EngineConfig(model="none"))
    assert isinstance(policies.turns, RowShares)
    assert policies.turns in policies.listeners
    assert isinstance(make_policies(EngineConfig(model="none", shared_step_rows=None)).turns, EveryStep)
