"""Counts the reasoning tokens of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ReasoningTokens", "reasoning_token_ids"]

_LEADING = 2  # tokens before the tag: whitespace


def reasoning_token_ids(tags: tuple[str, str], info: Mapping[str, Any]) -> tuple[int, int] | None:
    """The tokens of the tags; None if a tag is not one token, or the model does not say.

    Args:
        info: facts about the model, with `reasoning_tags` and `reasoning_token_ids`.
    """
    ids = info.get("reasoning_token_ids")
    if info.get("reasoning_tags") != list(tags) or not isinstance(ids, Sequence) or len(ids) != 2:
        return None
    return ids[0], ids[1]


class ReasoningTokens:
    """Counts the reasoning tokens of all answers to a request, without the tags.

    Args:
        ids: tokens of the two tags.
        opened: whether the prompt contained the first one.

    Attributes:
        count: of all answers so far.
    """

    def __init__(self, ids: tuple[int, int], opened: bool) -> None:
        self.count = 0
        self._begin, self._end = ids
        self._opened = opened
        self._seen: dict[int, int] = {}  # tokens of each answer that did not begin to think yet
        self._thinking: dict[int, bool] = {}

    def add(self, index: int, token_ids: Sequence[int]) -> None:
        """Add tokens of answer number `index`."""
        for token in token_ids:
            if token == self._begin and self._seen.get(index, 0) < _LEADING and index not in self._thinking:
                self._thinking[index] = True
            elif not self._thinking.get(index, self._opened):
                self._seen[index] = self._seen.get(index, 0) + 1
            elif token == self._end:
                self._thinking[index] = False
            else:
                self._thinking[index] = True
                self.count += 1
