"""`min_tokens`: EOS and stop token ids are masked until the output has that many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import NO_SEQUENCE, SequenceId
from inflight.sampling.rules.base import BannedTokens, RowBatch
from inflight.sampling.rules.ragged import RaggedRows

__all__ = ["MinTokens"]


class MinTokens:
    """A `LogitsRule`.  EOS ids are masked with `ignore_eos` too."""

    is_mask: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    warm_up_params: ClassVar[SamplingParams] = SamplingParams(min_tokens=1, stop_token_ids=[0])

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._stop_ids = RaggedRows(max_num_seqs, np.int64)

    def set_row(
        self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int], sequence: SequenceId = NO_SEQUENCE
    ) -> bool:
        if not params.min_tokens:
            return False
        # A tokenizer can know more ids than the checkpoint has logits.
        stop_ids = sorted({t for t in (*eos_token_ids, *params.stop_token_ids) if 0 <= t < self._vocab_size})
        self._min_tokens[slot] = params.min_tokens
        self._stop_ids.set(slot, np.array(stop_ids, dtype=np.int64))
        return bool(stop_ids)

    def prepare(self, batch: RowBatch) -> BannedTokens | None:
        num_output_tokens = batch.positions - batch.num_prompt_tokens
        early = np.flatnonzero(num_output_tokens < self._min_tokens[batch.slots])
        if not len(early):
            return None
        places, owners = self._stop_ids.places(batch.slots[early])
        index = self._stop_ids.columns[0][places] + batch.rows[early][owners] * self._vocab_size
        return BannedTokens(batch.put(index))
