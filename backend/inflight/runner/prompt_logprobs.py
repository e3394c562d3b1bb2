"""Log probabilities of prompts: which positions of a step predict a prompt token, and for which rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from inflight.device.batch_state import BatchState
from inflight.engine.logprobs import Logprobs
from inflight.engine.step import SchedulerOutput
from inflight.sampling.token_logprobs import PendingLogprobs, token_logprobs

__all__ = ["AskedPositions", "PendingPromptLogprobs", "PromptLogprobs"]

_NOTHING = np.empty(0, dtype=np.int64)

_ALL = 2**31 - 1  # more than any vocabulary has


@dataclass(slots=True)
class AskedPositions:
    """The P positions of a step that predict a prompt token of a row that asked, row after row; on the host.

    Attributes:
        counts: row -> how many of them are its own.
        indices: int64 [P]; tokens among the step's T.
        next_token_ids: int64 [P]; the prompt token after each.
        tops: [P]; number of most likely tokens beside each.
    """

    counts: dict[int, int]
    indices: np.ndarray
    next_token_ids: np.ndarray
    tops: list[int]

    def launch(self, chunks: Iterable[Tensor], next_token_ids: Tensor) -> PendingPromptLogprobs:
        """Start making them, from logits [P, V] in chunks of any size; `next_token_ids` is on their device."""
        parts: list[PendingLogprobs] = []
        start = 0
        for logits in chunks:
            part = slice(start, start + len(logits))
            parts.append(token_logprobs(logits, next_token_ids[part], self.tops[part]))
            start = part.stop
        return PendingPromptLogprobs(self.counts, parts)


@dataclass(slots=True)
class PendingPromptLogprobs:
    """All rows' log probabilities on their way to the host, in parts; `AskedPositions.counts` assigns them to rows."""

    counts: dict[int, int]
    parts: list[PendingLogprobs]

    def take(self) -> dict[int, Logprobs]:
        """row -> its log probabilities; waits for the device."""
        whole = Logprobs.joined([part.take() for part in self.parts])
        return dict(zip(self.counts, whole.split(self.counts.values())))


class PromptLogprobs:
    """Remembers which slots asked."""

    def __init__(self, state: BatchState) -> None:
        self._state = state
        self._tops: dict[int, int] = {}  # slot -> top entries
        self._complete: list[int] = []  # slots whose prompt the step completes: a step can be made again

    def fill_rows(self, out: SchedulerOutput) -> None:
        """Remember which of the entering rows ask; once per step."""
        for slot in self._complete:
            self._tops.pop(slot, None)
        self._complete.clear()
        for row in out.new_rows:
            self._tops.pop(row.slot, None)
            if (top := row.params.prompt_logprobs) is not None:
                self._tops[row.slot] = _ALL if top == -1 else top

    def asked(self, out: SchedulerOutput, starts: Sequence[int]) -> AskedPositions:
        """The positions with logits to compute; call `fill_rows` first.  A complete prompt needs no more.

        Args:
            starts: `query_start_loc`.
        """
        state = self._state
        asked = AskedPositions({}, _NOTHING, _NOTHING, [])
        indices, next_token_ids = [], []
        for row, slot in enumerate(out.slots if self._tops else ()):
            if (top := self._tops.get(slot)) is None:
                continue
            first, num_prompt_tokens = out.num_computed_tokens[row], int(state.num_prompt_tokens[slot])
            end = first + out.num_scheduled_tokens[row]
            if end >= num_prompt_tokens:
                self._complete.append(slot)
            if first >= num_prompt_tokens:
                continue  # it was resumed with all of its prompt computed
            count = min(end, num_prompt_tokens - 1) - first
            asked.counts[row] = count
            asked.tops += [top] * count
            indices.append(np.arange(starts[row], starts[row] + count))
            next_token_ids.append(state.token_ids[slot, first + 1 : first + 1 + count])
        if indices:
            asked.indices = np.concatenate(indices)
            asked.next_token_ids = np.concatenate(next_token_ids).astype(np.int64)
        return asked
