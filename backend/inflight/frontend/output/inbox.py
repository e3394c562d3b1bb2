"""Deltas that a stream has received from the engine and not processed yet.  No threads, no torch, no Triton."""

from __future__ import annotations

from collections import deque
from typing import Union

import msgspec

from inflight.engine.deltas import SequenceDelta

__all__ = ["Inbox", "TokenRun", "is_one_token"]

MOST_TOKENS = 32  # of a run: a turn can end behind each


class TokenRun(msgspec.Struct, gc=False):
    """Tokens of one sequence; each was all that a step had for it."""

    index: int
    token_ids: list[int]


class Inbox:
    """The output of a stream's sequences, in the order of each.

    Most of it is single tokens.  Tokens that wait together are one entry, so that each costs one item of a list.

    Attributes:
        num_waiting: deltas in it; each token of a run counts as one.
    """

    def __init__(self) -> None:
        self._entries: deque[Union[SequenceDelta, TokenRun]] = deque()
        self._runs: dict[int, list[int]] = {}  # index of a sequence -> its last entry, if that can grow
        self.num_waiting = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, delta: SequenceDelta) -> None:
        """A delta has arrived."""
        if is_one_token(delta):
            return self.add_token(delta.index, delta.token_ids[0])
        self._runs.pop(delta.index, None)
        self._entries.append(delta)
        self.num_waiting += 1

    def add_token(self, index: int, token_id: int) -> None:
        """A step had this token for a sequence, and nothing else."""
        run = self._runs.get(index)
        if run is None or len(run) >= MOST_TOKENS:
            run = self._runs[index] = []
            self._entries.append(TokenRun(index, run))
        run.append(token_id)
        self.num_waiting += 1

    def take(self) -> SequenceDelta | TokenRun:
        """Remove and return the oldest entry; raises IndexError if there is none."""
        entry = self._entries.popleft()
        if isinstance(entry, TokenRun):
            if self._runs.get(entry.index) is entry.token_ids:
                del self._runs[entry.index]
            self.num_waiting -= len(entry.token_ids)
        else:
            self.num_waiting -= 1
        return entry

    def clear(self) -> None:
        """Forget what is left."""
        self._entries.clear()
        self._runs.clear()
        self.num_waiting = 0


def is_one_token(delta: SequenceDelta) -> bool:
    """Whether nothing but a token is new."""
    return (
        len(delta.token_ids) == 1
        and delta.finish_reason is None
        and delta.logprobs is None
        and delta.prompt_logprobs is None
        and delta.num_cached_tokens is None
        and delta.times is None
        and delta.pooled is None
    )
