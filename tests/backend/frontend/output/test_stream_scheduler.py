"""Turns are fair by cost; a key waits for at most one turn of each other key, and none is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inflight.frontend.output.stream_scheduler import StreamScheduler

costs = st.floats(0.0, 10.0, allow_nan=False)


def serve(scheduler: StreamScheduler[str], cost: float) -> str | None:
    """One turn of the given cost."""
    key = scheduler.take()
    if key is not None:
        scheduler.charge(key, cost)
    return key


def test_equal_keys_are_served_in_the_order_in_which_they_came() -> None:
    scheduler: StreamScheduler[str] = StreamScheduler()
    for key in ("b", "a", "c", "a"):
        scheduler.add(key)
    assert len(scheduler) == 3
    assert [scheduler.take() for _ in range(4)] == ["b", "a", "c", None]


def test_a_costly_key_falls_behind_cheap_ones() -> None:
    scheduler: StreamScheduler[str] = StreamScheduler()
    order = []
    for key in ("dear", "cheap"):
        scheduler.add(key)
    for _ in range(12):
        key = serve(scheduler, 1.0)
        assert key is not None
        if key == "dear":
            scheduler.charge(key, 9.5)
        order.append(key)
        scheduler.add(key)
    assert order[:2] == ["dear", "cheap"]
    assert order[2:11] == ["cheap"] * 9
    assert order[11] == "dear"


@given(st.dictionaries(st.integers(0, 5), costs, min_size=2), st.integers(1, 200))
def test_no_busy_key_gets_ahead_of_another_by_more_than_their_two_largest_turns(
    cost: dict[int, float], rounds: int
) -> None:
    scheduler: StreamScheduler[int] = StreamScheduler()
    served = dict.fromkeys(cost, 0.0)
    for key in cost:
        scheduler.add(key)
    for _ in range(rounds):
        key = scheduler.take()
        assert key is not None
        scheduler.charge(key, cost[key])
        served[key] += cost[key]
        scheduler.add(key)
        for a in cost:
            assert all(served[a] - served[b] <= cost[a] + cost[b] + 1e-6 for b in cost)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["add", "take", "forget"]), costs), max_size=120))
def test_a_key_that_has_caught_up_waits_for_at_most_one_turn_of_each_other(moves: list[tuple[str, str, float]]) -> None:
    """No waiting key is lost or served twice."""
    scheduler: StreamScheduler[str] = StreamScheduler()
    waiting: dict[str, list[str]] = {}  # who waits -> who was served since
    reach: dict[str, float] = {}  # virtual time up to which a key has been served
    now = 0.0
    for key, move, cost in moves:
        if move == "add":
            if key not in waiting and reach.get(key, 0.0) <= now:
                waiting[key] = []
            elif key not in waiting:
                waiting[key] = ["ahead"]  # it has had more than its share: no promise
            scheduler.add(key)
        elif move == "forget":
            scheduler.forget(key)
            waiting.pop(key, None)
            reach.pop(key, None)
        else:
            got = scheduler.take()
            assert (got is None) == (not waiting)
            if got is None:
                continue
            assert got in waiting
            now = max(now, reach.get(got, 0.0))
            scheduler.charge(got, cost)
            reach[got] = now + cost
            del waiting[got]
            for others in waiting.values():
                others.append(got)
                if others[0] != "ahead":
                    assert len(others) == len(set(others)), "a key had two turns before one that was due"
        assert len(scheduler) == len(waiting)
