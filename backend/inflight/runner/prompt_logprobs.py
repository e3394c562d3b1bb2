"""Log probabilities of prompts: which positions of a step predict a prompt token, and their entries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.engine.messages import TokenLogprobs
from inflight.engine.step import SchedulerOutput
from inflight.runner.batch_state import BatchState, StepInputs
from inflight.sampling import prompt_logprobs
from inflight.sampling.upload import upload

__all__ = ["AskedPositions", "PromptLogprobs"]

_ALL = 2**31 - 1  # more than any vocabulary has


@dataclass(slots=True)
class AskedPositions:
    """The P positions of a step that predict a prompt token of a row that asked, row after row.

    Attributes:
        counts: row -> how many of them are its own.
        indices: int64 [P] on the device; tokens among the step's T.
        next_token_ids: int64 [P] on the host; the prompt token after each.
        tops: [P]; number of most likely tokens in each entry.
    """

    counts: dict[int, int]
    indices: Tensor
    next_token_ids: np.ndarray
    tops: list[int]

    def entries(self, chunks: Iterable[Tensor]) -> dict[int, list[TokenLogprobs]]:
        """row -> its entries, from logits [P, V] in chunks of any size."""
        entries: list[TokenLogprobs] = []
        for logits in chunks:
            part = slice(len(entries), len(entries) + len(logits))
            next_token_ids, tops = upload(self.next_token_ids[part], logits.device), self.tops[part]
            found = prompt_logprobs(logits, next_token_ids, max(tops))
            entries += [entry[: 1 + top] for entry, top in zip(found, tops)]
        of_row, start = {}, 0
        for row, count in self.counts.items():
            of_row[row] = entries[start : start + count]
            start += count
        return of_row


class PromptLogprobs:
    """Remembers which slots asked."""

    def __init__(self, state: BatchState) -> None:
        self._state = state
        self._tops: dict[int, int] = {}  # slot -> top entries

    def fill_rows(self, out: SchedulerOutput) -> None:
        """Take the wishes of the rows that enter."""
        for row in out.new_rows:
            self._tops.pop(row.slot, None)
            if (top := row.params.prompt_logprobs) is not None:
                self._tops[row.slot] = _ALL if top == -1 else top

    def asked(self, out: SchedulerOutput, inputs: StepInputs) -> AskedPositions:
        """The positions whose logits are needed; call `fill_rows` first.  A complete prompt asks for no more."""
        state, starts = self._state, inputs.metadata.query_start_loc_cpu
        asked = AskedPositions({}, torch.empty(0, dtype=torch.int64), np.empty(0, dtype=np.int64), [])
        indices, next_token_ids = [], []
        for row, slot in enumerate(out.slots if self._tops else ()):
            if (top := self._tops.get(slot)) is None:
                continue
            first, num_prompt_tokens = out.num_computed_tokens[row], int(state.num_prompt_tokens[slot])
            end = first + out.num_scheduled_tokens[row]
            if end >= num_prompt_tokens:
                del self._tops[slot]
            if first >= num_prompt_tokens:
                continue  # it came back with all of its prompt computed
            count = min(end, num_prompt_tokens - 1) - first
            asked.counts[row] = count
            asked.tops += [top] * count
            indices.append(np.arange(starts[row], starts[row] + count))
            next_token_ids.append(state.token_ids[slot, first + 1 : first + 1 + count])
        if indices:
            asked.indices = upload(np.concatenate(indices), state.device)
            asked.next_token_ids = np.concatenate(next_token_ids).astype(np.int64)
        return asked
