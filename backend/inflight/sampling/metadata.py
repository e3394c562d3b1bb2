"""The inputs of one sampling call, assembled on the host and uploaded once, and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

import numpy as np
from torch import Tensor

from inflight.engine.logprobs import Logprobs
from inflight.engine.sampling_params import SamplingParams
from inflight.sampling.ops import SamplingOps
from inflight.sampling.reference_sampling import REFERENCE
from inflight.sampling.rules import LogitsEdit, LogitsMask
from inflight.sampling.token_logprobs import PendingLogprobs

__all__ = ["COLUMN_LINES", "Kind", "RandomGroup", "SampleRow", "SamplerOutput", "SamplingMetadata"]

COLUMN_LINES = 7  # of `SamplingMetadata.columns`


class Kind(IntEnum):
    """How a column of `SamplingMetadata.columns` is drawn: data, so that one captured launch serves any mix."""

    PADDING = -1  # not at all
    GREEDY = 0
    RANDOM = 1  # from the whole vocabulary
    NARROWED = 2  # by top_p or min_p
    TOP_K = 3  # with or without top_p and min_p


@dataclass(slots=True)
class SampleRow:
    """One row as described by a caller without a `SamplingTable`.

    Attributes:
        seed: 64-bit seed of this sequence.
        position: number of tokens before the one to sample, the prompt and output below.
        prompt_token_ids, output_token_ids: int32 views.
        eos_token_ids: masked, with `params.stop_token_ids`, until `params.min_tokens`.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_token_ids: np.ndarray
    output_token_ids: np.ndarray
    eos_token_ids: Sequence[int] = ()


class SamplerOutput:
    """Attributes:
    token_ids: int64[R] on the device of the logits; every entry is in [0, V), or `unusable.NO_TOKEN` where the
        row's logits are not finite.
    logprobs_rows: rows whose params ask for log probabilities, increasing.
    failures: row -> why its token is void, where a mask knows the reason.
    """

    __slots__ = ("_pending", "failures", "logprobs_rows", "token_ids")

    def __init__(
        self,
        token_ids: Tensor,
        rows: list[int],
        pending: PendingLogprobs | None,
        failures: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.token_ids = token_ids
        self.logprobs_rows = rows
        self.failures = failures
        self._pending = pending

    @property
    def logprobs(self) -> Logprobs:
        """Those of `logprobs_rows`: of the chosen token, then of the top k.

        These are ordered by falling log probability; the chosen token is repeated if it is among
        them.  Waits until the device has finished this call, not what was launched after it.
        """
        return Logprobs() if self._pending is None else self._pending.take()


@dataclass(slots=True)
class RandomGroup:
    """r random rows that are drawn in the same way; tensors on the device.

    Attributes:
        rows: int64[r], rows of the logits.
        start: first row if `rows` are consecutive, else -1.
        keys: two int32[r, 1], see `noise.row_keys`.
        inverse_temperature: float32[r, 1].
        max_top_k: largest `top_k` of the group; 0 if no row has one.
        top_k: int64[r, 1]; meaningful if `max_top_k` is not 0.
        top_p: float64[r, 1], or None if no row uses it.
        min_p: float32[r, 1], or None if no row uses it.
    """

    rows: Tensor
    start: int
    keys: tuple[Tensor, Tensor]
    inverse_temperature: Tensor
    max_top_k: int
    top_k: Tensor
    top_p: Tensor | None
    min_p: Tensor | None


@dataclass(slots=True)
class SamplingMetadata:
    """One sampling call over R rows.  Made by `SamplingTable.select`, `sampling_metadata` or `all_greedy`.

    Attributes:
        num_rows: R.
        ops: the operations of the device.
        vocab_size: V, which flat indices of `edits` count with; None if every row is plain greedy.
        greedy_rows: int64[g], rows that take the argmax; None if all rows do, or where `ops.choose`
            draws all of them.
        columns: int64[COLUMN_LINES, R] on the device, one column per row: in the order of the rows where `ops.choose`
            draws all of them, else in any.  Lines: row of the logits; the row's two int32 keys (`noise.row_keys`), the
            first in the low half; top_k; then inverse temperature, top_p and min_p as the bits of float64; `Kind`.
            May be None if all rows are greedy.
        random_groups: the random rows once more, grouped by how they are drawn; empty where
            `ops.choose` draws all of them.
        masks: changes to the logits that come first.  Log probabilities are those of what they leave.
        edits: the other changes to the logits, in order of application.
        logprobs: row -> number of top entries, for the rows that return log probabilities.
        logprobs_rows: int64[len(logprobs)], these rows on the device.
    """

    num_rows: int
    ops: SamplingOps = field(default=REFERENCE, compare=False)
    vocab_size: int | None = None
    greedy_rows: Tensor | None = None
    columns: Tensor | None = None
    random_groups: list[RandomGroup] = field(default_factory=list)
    masks: list[LogitsMask] = field(default_factory=list)
    edits: list[LogitsEdit] = field(default_factory=list)
    logprobs: dict[int, int] = field(default_factory=dict)
    logprobs_rows: Tensor | None = None

    @classmethod
    def all_greedy(cls, num_rows: int, ops: SamplingOps = REFERENCE) -> SamplingMetadata:
        """Every row takes the argmax of its logits and nothing else."""
        return cls(num_rows, ops)
