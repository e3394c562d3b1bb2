"""`allowed_token_ids`: no other token can be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import NO_SEQUENCE, SequenceId
from inflight.sampling.rules.base import RowBatch, check_token_ids
from inflight.sampling.rules.ragged import RaggedRows
from inflight.sampling.rules.remembered import Remembered

__all__ = ["AllowedTokens"]


class AllowedTokens:
    """A `LogitsRule`."""

    is_mask: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    warm_up_params: ClassVar[SamplingParams] = SamplingParams(allowed_token_ids=[0])

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._allowed = RaggedRows(max_num_seqs, np.int64)
        self._ids = Remembered(self._checked_ids)

    def set_row(
        self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int], sequence: SequenceId = NO_SEQUENCE
    ) -> bool:
        if params.allowed_token_ids is None:
            return False
        self._allowed.set(slot, self._ids(params.allowed_token_ids))
        return True

    def _checked_ids(self, token_ids: list[int]) -> np.ndarray:
        ids = np.unique(np.array(token_ids, dtype=np.int64))
        check_token_ids("allowed_token_ids", ids, self._vocab_size)
        return ids

    def prepare(self, batch: RowBatch) -> KeptTokens:
        places, owners = self._allowed.places(batch.slots)
        index = self._allowed.columns[0][places] + batch.rows[owners] * self._vocab_size
        return KeptTokens(batch.put(batch.rows), batch.put(index))


@dataclass(slots=True)
class KeptTokens:
    """Attributes:
    rows: int64[r], rows of the logits in which all is masked,
    index: int64[N], except for these: row * V + token id; pairs are distinct.
    """

    rows: Tensor
    index: Tensor

    def apply(self, logits: Tensor) -> None:
        flat = logits.view(-1)
        kept = flat[self.index]
        logits.index_fill_(0, self.rows, float("-inf"))
        flat[self.index] = kept
