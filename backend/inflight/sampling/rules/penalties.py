"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu.launch import can_launch
from inflight.sampling.rules.base import RowBatch
from inflight.sampling.rules.token_counts import TokenCounts

__all__ = ["PenalisedTokens", "Penalties", "penalised"]

_NONE = 1.0, 0.0, 0.0


class Penalties:
    """A `LogitsRule`: repetition over prompt and output, frequency and presence over the output."""

    reads_tokens: ClassVar[bool] = True
    warm_up_params: ClassVar[SamplingParams] = SamplingParams(repetition_penalty=2.0)

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._strengths = np.tile(np.array([_NONE], dtype=np.float32).T, max_num_seqs)
        # Of the tokens before the slot's first position in the last call; None until its first call.
        self._counts: list[TokenCounts | None] = [None] * max_num_seqs

    def set_row(self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int]) -> bool:
        strengths = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._strengths[:, slot] = strengths
        self._counts[slot] = None
        return strengths != _NONE

    def prepare(self, batch: RowBatch) -> PenalisedTokens:
        ids, counts = [], []
        columns = batch.slots, batch.num_prompt_tokens, batch.first_positions, batch.positions
        for slot, start, first, position in zip(*(column.tolist() for column in columns)):
            seen = self._counts[slot]
            if seen is None:
                seen = self._start(slot, batch.token_ids[slot, :start])
            if position == first:
                seen.update(batch.token_ids[slot], first)
                ids.append(seen.ids[: seen.size])
                counts.append(seen.counts[: seen.size])
            else:
                row_ids, row_counts = seen.with_drafts(batch.token_ids[slot, first:position])
                ids.append(row_ids)
                counts.append(row_counts)
        owners = np.repeat(np.arange(len(ids)), [len(row_ids) for row_ids in ids])
        index = np.concatenate(ids) + batch.rows[owners] * self._vocab_size
        return PenalisedTokens(
            index=batch.put(index),
            counts=batch.put(np.concatenate(counts)),
            columns=batch.put(owners),
            strengths=batch.put(self._strengths[:, batch.slots]),
        )

    def _start(self, slot: int, prompt: np.ndarray) -> TokenCounts:
        seen = TokenCounts(prompt, with_prompt=bool(self._strengths[0, slot] != 1.0))
        self._counts[slot] = seen
        return seen


@dataclass(slots=True)
class PenalisedTokens:
    """N distinct (row, token) pairs of r rows.

    Attributes:
        index: int64[N], row * V + token id.
        counts: float32[N], occurrences in the output.
        columns: int64[N], column of `strengths` that holds for each pair.
        strengths: float32[3, r], repetition, frequency and presence penalty.
    """

    index: Tensor
    counts: Tensor
    columns: Tensor
    strengths: Tensor

    def apply(self, logits: Tensor) -> None:
        if can_launch(logits.device):
            from inflight.kernels.gpu import gpu_penalties

            gpu_penalties.penalise(logits, self)
        else:
            flat = logits.view(-1)
            flat[self.index] = penalised(flat[self.index], self.strengths[:, self.columns], self.counts)


def penalised(logits: Tensor, strengths: Tensor, counts: Tensor) -> Tensor:
    """Repetition (CTRL, arXiv:1909.05858), then frequency and presence (OpenAI's definition).

    Args:
        logits: float32 [n].
        strengths: float32 [3, n] or [3], repetition, frequency and presence penalty.
        counts: float32 [n], occurrences in the output.
    """
    repetition, frequency, presence = strengths
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - frequency * counts
    return logits - presence * (counts > 0)
