"""How often each token occurs in a sequence, kept up to date as the sequence grows."""

from __future__ import annotations

import numpy as np

__all__ = ["TokenCounts"]


class TokenCounts:
    """Distinct tokens of a sequence and how often each is in its output.

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
        """Count the output tokens in `tokens[:position]` that are not counted yet."""
        for token in tokens[self._counted : position].tolist():
            place = self._place.get(token)
            if place is None:
                self._append(token)
            else:
                self.counts[place] += 1
        self._counted = position

    def with_drafts(self, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copies of `ids` and `counts`, of equal length, in which `drafts` are counted too."""
        counts = self.counts[: self.size].copy()
        new: dict[int, int] = {}
        for token in drafts.tolist():
            if (place := self._place.get(token)) is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[place] += 1
        new_ids = np.fromiter(new, np.int64, len(new))
        new_counts = np.fromiter(new.values(), np.float32, len(new))
        return np.concatenate([self.ids[: self.size], new_ids]), np.concatenate([counts, new_counts])

    def _append(self, token: int) -> None:
        if self.size == len(self.ids):
            self.ids = np.concatenate([self.ids, np.empty_like(self.ids)])
            self.counts = np.concatenate([self.counts, np.empty_like(self.counts)])
        self.ids[self.size] = token
        self.counts[self.size] = 1
        self._place[token] = self.size
        self.size += 1
