"""What one sampling call needs, assembled on the host and uploaded once.  See `SamplingTable`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from inflight.engine.messages import TokenLogprobs
from inflight.engine.sampling_params import SamplingParams

__all__ = ["Penalties", "RandomGroup", "SampleRow", "SamplerOutput", "SamplingMetadata"]


@dataclass(slots=True)
class SampleRow:
    """Host-side description of one row, for callers without a `SamplingTable`.

    Attributes:
        seed: 64-bit seed of this sequence.
        position: tokens before the one to sample; the prompt and output below have that many.
        prompt_token_ids, output_token_ids: int32 views.
        eos_token_ids: masked, with `params.stop_token_ids`, until `params.min_tokens`.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_token_ids: np.ndarray
    output_token_ids: np.ndarray
    eos_token_ids: Sequence[int] = ()


@dataclass(slots=True)
class SamplerOutput:
    """Attributes:
    token_ids: int64[R] on the device of the logits; every entry is in [0, V).
    logprobs: row -> entry, for the rows whose params ask: the chosen token, then the top k
        by falling log probability (the chosen one appears again if it is among them).
    """

    token_ids: Tensor
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


@dataclass(slots=True)
class RandomGroup:
    """Rows drawn at random in the same way; r of them, tensors on the device.

    Attributes:
        rows: int64[r], rows of the logits.
        start: first row when `rows` is a run of consecutive rows, else -1.
        keys: two int32[r, 1], see `noise.row_keys`.
        inverse_temperature: float32[r, 1].
        max_top_k: largest `top_k` of the group; 0: no row has one.
        top_k: int64[r, 1]; meaningful when `max_top_k`.
        top_p: float64[r, 1], or None when no row narrows by it.
        min_p: float32[r, 1], or None when no row narrows by it.
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
class Penalties:
    """Penalised (row, token) pairs, N of them; tensors on the device.

    Attributes:
        index: int64[N], row * V + token id; pairs are distinct.
        counts: float32[N], occurrences in the output.
        rows: int64[N], row of each pair.
        strengths: float32[3, R], repetition, frequency and presence penalty of each row.
    """

    index: Tensor
    counts: Tensor
    rows: Tensor
    strengths: Tensor


@dataclass(slots=True)
class SamplingMetadata:
    """One sampling call over R rows.  Made by `SamplingTable.select`, `sampling_metadata` or `all_greedy`.

    Attributes:
        num_rows: R.
        vocab_size: V that the flat indices below count with; None without any.
        greedy_rows: int64[g], rows that take the argmax; None: all rows do.
        columns: int64[6, R] as uploaded, a column a row: greedy ones, those drawn plainly, those
            narrowed by top_p or min_p, those with top_k.  Lines: row of the logits; its two int32
            keys (`noise.row_keys`), the first in the low half; top_k; then as bits of float64
            inverse temperature, top_p and min_p.  None when all rows are greedy.
        first_columns: where the second, third and fourth of those kinds start.
        random_groups: the same rows but the greedy ones, in groups drawn alike.
        bias_index, bias_values: int64[N] row * V + token id (distinct), float32[N] added there.
        banned_index: int64[N] row * V + token id, masked.
        penalties: repetition, frequency and presence penalties.
        logprobs: row -> number of top entries, for rows that want log probabilities.
    """

    num_rows: int
    vocab_size: int | None = None
    greedy_rows: Tensor | None = None
    columns: Tensor | None = None
    first_columns: tuple[int, int, int] = (0, 0, 0)
    random_groups: list[RandomGroup] = field(default_factory=list)
    bias_index: Tensor | None = None
    bias_values: Tensor | None = None
    banned_index: Tensor | None = None
    penalties: Penalties | None = None
    logprobs: dict[int, int] = field(default_factory=dict)

    @property
    def edits_logits(self) -> bool:
        """Whether any row's logits are changed before the choice."""
        return self.bias_index is not None or self.banned_index is not None or self.penalties is not None

    @classmethod
    def all_greedy(cls, num_rows: int) -> SamplingMetadata:
        """Every row takes the argmax of its logits and nothing else."""
        return cls(num_rows)
