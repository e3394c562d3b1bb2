"""The inbox of a stream gives each sequence its output in the order in which it came."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.deltas import SequenceDelta
from inflight.frontend.output import inbox as module
from inflight.frontend.output.inbox import Inbox, TokenRun


def one(index: int, token: int) -> SequenceDelta:
    return SequenceDelta(1, index, [token])


def several(index: int, token: int) -> SequenceDelta:
    return SequenceDelta(1, index, [token, token + 1])


@given(st.lists(st.tuples(st.sampled_from(["token", "one", "several", "take"]), st.integers(0, 2)), max_size=200))
def test_no_token_is_lost_or_overtakes_another_of_its_sequence(orders: list[tuple[str, int]]) -> None:
    inbox = Inbox()
    given: list[list[int]] = [[], [], []]
    taken: list[list[int]] = [[], [], []]
    num_deltas = num_taken = 0

    def take() -> None:
        nonlocal num_taken
        entry = inbox.take()
        taken[entry.index] += entry.token_ids
        num_taken += len(entry.token_ids) if isinstance(entry, TokenRun) else 1

    for token, (order, index) in enumerate(orders):
        if order == "take":
            if inbox:
                take()
            continue
        given[index] += [token, token + 1] if order == "several" else [token]
        num_deltas += 1
        if order == "token":
            inbox.add_token(index, token)
        else:
            inbox.add(one(index, token) if order == "one" else several(index, token))
        assert inbox.num_waiting == num_deltas - num_taken
    while inbox:
        take()
    assert taken == given
    assert inbox.num_waiting == 0


def test_tokens_that_wait_are_one_entry_up_to_a_limit() -> None:
    inbox = Inbox()
    for token in range(module.MOST_TOKENS + 1):
        inbox.add_token(0, token)
        inbox.add_token(1, token)
    assert len(inbox) == 4
    first = inbox.take()
    assert (first.index, first.token_ids) == (0, list(range(module.MOST_TOKENS)))


def test_a_run_that_was_taken_does_not_grow() -> None:
    inbox = Inbox()
    inbox.add_token(0, 1)
    taken = inbox.take()
    inbox.add_token(0, 2)
    assert taken.token_ids == [1]
    assert inbox.take().token_ids == [2]
    inbox.add_token(0, 3)
    inbox.clear()
    assert (len(inbox), inbox.num_waiting) == (0, 0)
    inbox.add_token(0, 4)
    assert inbox.take().token_ids == [4]
