"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import NO_SEQUENCE, SequenceId
from inflight.sampling.ops import PenalisedTokens
from inflight.sampling.rules.base import RowBatch
from inflight.sampling.rules.token_counts import TokenCounts

__all__ = ["Penalties"]

_NONE = 1.0, 0.0, 0.0


class Penalties:
    """A `LogitsRule`: repetition over prompt and output, frequency and presence over the output."""

    is_mask: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = True
    warm_up_params: ClassVar[SamplingParams] = SamplingParams(repetition_penalty=2.0)

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._strengths = np.tile(np.array([_NONE], dtype=np.float32).T, max_num_seqs)
        # Of the tokens before the slot's first position in the last call; None until its first call.
        self._counts: list[TokenCounts | None] = [None] * max_num_seqs

    def set_row(
        self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int], sequence: SequenceId = NO_SEQUENCE
    ) -> bool:
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
            ops=batch.ops,
            index=batch.put(index),
            counts=batch.put(np.concatenate(counts)),
            columns=batch.put(owners),
            strengths=batch.put(self._strengths[:, batch.slots]),
        )

    def _start(self, slot: int, prompt: np.ndarray) -> TokenCounts:
        seen = TokenCounts(prompt, with_prompt=bool(self._strengths[0, slot] != 1.0))
        self._counts[slot] = seen
        return seen
