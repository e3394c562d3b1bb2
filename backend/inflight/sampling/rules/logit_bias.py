"""`logit_bias`: a value added to the logits of chosen tokens."""

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

__all__ = ["LogitBias"]

# Larger biases are clipped to this, so that sums stay finite; those below its negative ban the token.
_MAX_BIAS = 1e30


class LogitBias:
    """A `LogitsRule`.  Minus infinity bans a token, NaN leaves it alone."""

    is_mask: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    warm_up_params: ClassVar[SamplingParams] = SamplingParams(logit_bias={0: 1.0})

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._bias = RaggedRows(max_num_seqs, np.int64, np.float32)  # token ids, values
        self._columns = Remembered(self._checked_columns)

    def set_row(
        self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int], sequence: SequenceId = NO_SEQUENCE
    ) -> bool:
        bias = params.logit_bias
        if not bias:
            return False
        self._bias.set(slot, *self._columns(bias))
        return True

    def _checked_columns(self, bias: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and values."""
        ids = np.fromiter(bias, np.int64, len(bias))
        check_token_ids("logit_bias", ids, self._vocab_size)
        values = np.fromiter(bias.values(), np.float64, len(bias))
        return ids, np.where(values < -_MAX_BIAS, -np.inf, np.minimum(np.nan_to_num(values), _MAX_BIAS))

    def prepare(self, batch: RowBatch) -> AddedBias:
        places, owners = self._bias.places(batch.slots)
        ids, values = self._bias.columns
        index = ids[places] + batch.rows[owners] * self._vocab_size
        return AddedBias(batch.put(index), batch.put(values[places]))


@dataclass(slots=True)
class AddedBias:
    """Attributes:
    index: int64[N], row * V + token id; pairs are distinct.
    values: float32[N], added there.
    """

    index: Tensor
    values: Tensor

    def apply(self, logits: Tensor) -> None:
        logits.view(-1)[self.index] += self.values
