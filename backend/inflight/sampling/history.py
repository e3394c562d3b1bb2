"""What a row's past tokens forbid or penalise, kept on the host between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

__all__ = ["TokenCounts", "TokenHistory", "banned_tokens"]


class TokenHistory(Protocol):
    """slot -> int array of that request's tokens, prompt first.

    Only entries before the row's position are read.  A 2-D array indexed by slot is one.
    """

    def __getitem__(self, slot: int, /) -> np.ndarray: ...


class TokenCounts:
    """Distinct tokens of a sequence and how often each is in its output; grown as it grows.

    A step costs O(new tokens), not O(sequence).

    Attributes:
        size: distinct tokens so far; `ids[:size]` and `counts[:size]` are valid.
        ids: int64, distinct token ids.
        counts: float32, occurrences in the output (0 for tokens of the prompt only).

    Args:
        prompt: int[num_prompt_tokens].
        with_prompt: list the prompt's tokens too; only the repetition penalty looks at them.
    """

    __slots__ = ("_counted", "_place", "counts", "ids", "size")

    def __init__(self, prompt: np.ndarray, *, with_prompt: bool) -> None:
        distinct = np.unique(prompt if with_prompt else prompt[:0]).astype(np.int64)
        self.size = len(distinct)
        self.ids = np.empty(self.size + 64, dtype=np.int64)
        self.ids[: self.size] = distinct
        self.counts = np.zeros(len(self.ids), dtype=np.float32)
        self._place = {token: i for i, token in enumerate(distinct.tolist())}
        self._counted = len(prompt)

    def update(self, tokens: np.ndarray, position: int) -> None:
        """Count the output tokens in `tokens[:position]` not counted yet."""
        for token in tokens[self._counted : position].tolist():
            place = self._place.setdefault(token, self.size)
            if place == self.size:
                self._append(token)
            self.counts[place] += 1
        self._counted = position

    def _append(self, token: int) -> None:
        if self.size == len(self.ids):
            self.ids = np.concatenate([self.ids, np.empty_like(self.ids)])
            self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
        self.ids[self.size] = token
        self.size += 1


def banned_tokens(bad_words: Sequence[Sequence[int]], output: np.ndarray) -> list[int]:
    """Last token of every bad word whose other tokens are the end of `output`."""
    banned = []
    for word in bad_words:
        head = len(word) - 1
        if head <= len(output) and output[len(output) - head :].tolist() == list(word[:head]):
            banned.append(word[head])
    return banned
