"""Sampling parameters of all slots as a struct of arrays: one row per slot, filled on admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.device.upload import upload
from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import NO_SEQUENCE, SequenceId
from inflight.sampling.metadata import COLUMN_LINES, Kind, RandomGroup, SampleRow, SamplingMetadata
from inflight.sampling.noise import mix_seed, row_keys
from inflight.sampling.ops import SamplingOps
from inflight.sampling.reference_sampling import REFERENCE
from inflight.sampling.rules import RULES, LogitsRule, Put, RowBatch

__all__ = ["GREEDY_TEMPERATURE", "SamplingTable", "sampling_metadata"]

# Below this a request is greedy.
GREEDY_TEMPERATURE = 1e-5

# Flags of a slot that needs more than an argmax: these, then one bit per rule.  0 is plain greedy.
_RANDOM, _LOGPROBS, _FIRST_RULE = 1, 2, 4

# How a random slot is drawn: from the whole vocabulary, plain or narrowed by top_p or min_p, or
# from its top_k tokens.  Rows of a bucket are drawn together; there are several top_k buckets so
# that a row with a large k does not widen the candidates of all the others.
_FULL, _NARROWED = int(Kind.RANDOM), int(Kind.NARROWED)
_TOP_K_BUCKETS = (64, 1024, 2**31)
_NUM_BUCKETS = _NARROWED + 1 + len(_TOP_K_BUCKETS)

_NO_TOKENS = np.empty((0, 0), dtype=np.int32)


class SamplingTable:
    """Preprocessed sampling parameters, one row per slot.

    Call `set_row` once per admission and `select` once per step.  `select` costs a few numpy
    gathers, whatever the batch; rules add theirs for the rows they act on.

    Args:
        max_num_seqs: number of slots.
        vocab_size: V, the last dimension of the logits.
        device: where the logits are.
        rules: kinds of logits rules, in order of application.
        ops: the operations of the device.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        rules: Sequence[type[LogitsRule]] = RULES,
        ops: SamplingOps = REFERENCE,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._ops = ops
        self._flags = np.zeros(max_num_seqs, dtype=np.int64)
        self._bucket = np.zeros(max_num_seqs, dtype=np.int64)
        self._origin = np.zeros(max_num_seqs, dtype=np.uint64)
        self._inverse_temperature = np.ones(max_num_seqs, dtype=np.float64)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float64)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self._rules = [(_FIRST_RULE << i, rule(max_num_seqs, vocab_size, self.device)) for i, rule in enumerate(rules)]
        self._reading_rules = sum(flag for flag, rule in self._rules if rule.reads_tokens)

    def set_row(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        eos_token_ids: Sequence[int],
        num_prompt_tokens: int,
        sequence: SequenceId = NO_SEQUENCE,
    ) -> None:
        """Fill a slot: a request was admitted, or resumed after preemption.  Replaces all contents.

        Args:
            params: validated by the caller.
            seed: 64-bit seed of this sequence; siblings of an n > 1 request have different ones.
            eos_token_ids: masked, with `params.stop_token_ids`, until `params.min_tokens`.
            num_prompt_tokens: where the output starts in the row's tokens.
            sequence: the one that enters; rules share state with the other components that follow it.

        Raises:
            ValueError: a rule would write to a token id outside the vocabulary.
        """
        flags = self._flags[slot] = 0
        self._num_prompt_tokens[slot] = num_prompt_tokens
        self._bucket[slot] = 0
        if params.temperature >= GREEDY_TEMPERATURE:
            flags |= _RANDOM
            self._set_random(slot, params, seed)
        if params.logprobs is not None:
            flags |= _LOGPROBS
            self._logprobs[slot] = self.vocab_size if params.logprobs == -1 else params.logprobs
        for flag, rule in self._rules:
            if rule.set_row(slot, params, eos_token_ids, sequence):
                flags |= flag
        self._flags[slot] = flags

    def _set_random(self, slot: int, params: SamplingParams, seed: int) -> None:
        self._origin[slot] = mix_seed(seed)
        self._inverse_temperature[slot] = 1.0 / params.temperature
        self._top_p[slot], self._min_p[slot] = params.top_p, params.min_p
        if 0 < params.top_k < self.vocab_size:
            self._top_k[slot] = params.top_k
            self._bucket[slot] = _NARROWED + 1 + int(np.searchsorted(_TOP_K_BUCKETS, params.top_k))
        else:
            self._bucket[slot] = _NARROWED if params.top_p < 1.0 or params.min_p > 0.0 else _FULL

    def select(
        self,
        slots: np.ndarray | Sequence[int],
        positions: np.ndarray | Sequence[int],
        token_ids: np.ndarray | None = None,
        put: Put | None = None,
        history: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> SamplingMetadata:
        """Describe one sampling call: row i of the logits belongs to `slots[i]`.

        A slot with draft tokens appears several times, in consecutive rows at increasing positions.

        Args:
            slots: int[R]; each was filled by `set_row`.
            positions: int[R], absolute position of the token being sampled: the number of
                tokens before it.
            token_ids: int[max_num_seqs, n], the tokens of each slot, drafts included; read up to
                the position, and only for rows with a rule that reads tokens.  Tokens before
                the slot's first position in this call must stay as they are until its next
                `set_row`; later ones are drafts and can differ in the next call.
            put: brings arrays to the device; by default each at once.
            history: int32 [slots, n], the slots' tokens on the device, for rules that read them there.
            columns: int64[COLUMN_LINES, C] on the device, where the caller puts what `fill_columns` makes; the
                logits have C rows; only the first R belong to a slot.

        Raises:
            ValueError: `token_ids` is None but a row needs it.
        """
        slots = np.asarray(slots, dtype=np.int64)
        flags = self._flags[slots]
        needed = int(np.bitwise_or.reduce(flags)) if len(slots) else 0
        metadata = SamplingMetadata.all_greedy(len(slots), self._ops)
        if columns is not None:
            metadata.num_rows, metadata.columns = columns.shape[1], columns
        if not needed:
            return metadata
        metadata.vocab_size = self.vocab_size
        positions = np.asarray(positions, dtype=np.int64)
        if needed & _RANDOM:
            self._add_random(metadata, slots, positions)
        if needed & _LOGPROBS:
            rows = np.flatnonzero(flags & _LOGPROBS)
            metadata.logprobs = dict(zip(rows.tolist(), self._logprobs[slots[rows]].tolist()))
            metadata.logprobs_rows = (put or self._put)(rows)
        if needed >= _FIRST_RULE:
            batch = RowBatch(
                rows=np.arange(len(slots)),
                slots=slots,
                positions=positions,
                first_positions=_first_positions(slots, positions),
                num_prompt_tokens=self._num_prompt_tokens[slots],
                token_ids=_NO_TOKENS if token_ids is None else token_ids,
                put=put or self._put,
                ops=self._ops,
                history=history,
            )
            self._add_edits(metadata, flags, batch, has_tokens=token_ids is not None)
        return metadata

    def fill_columns(
        self, columns: np.ndarray, slots: np.ndarray, positions: np.ndarray, rows: np.ndarray | None = None
    ) -> None:
        """Describe R rows to the kernel that draws them (`SamplingOps.choose`).

        Args:
            columns: int64[COLUMN_LINES, C >= R] on the host, overwritten; see `SamplingMetadata.columns`.  The
                columns behind the R rows become padding.
            slots, positions: int64[R], as for `select`.
            rows: int64[R], rows of the logits; 0, 1, 2 ... by default.
        """
        count = len(slots)
        columns[:, count:] = int(Kind.PADDING)
        columns = columns[:, :count]
        columns[0] = np.arange(count) if rows is None else rows
        columns[1] = row_keys(self._origin[slots], positions).T.copy().view(np.int64)[:, 0]
        columns[2] = self._top_k[slots]
        columns[3] = self._inverse_temperature[slots].view(np.int64)
        columns[4] = self._top_p[slots].view(np.int64)
        columns[5] = self._min_p[slots].view(np.int64)
        np.minimum(self._bucket[slots], int(Kind.TOP_K), out=columns[6])

    def reads_tokens(self, slots: np.ndarray) -> bool:
        """Whether `select` for int64 `slots` needs `token_ids`."""
        return bool((self._flags[slots] & self._reading_rules).any())

    def _put(self, array: np.ndarray) -> Tensor:
        return upload(array, self.device)

    def _add_random(self, metadata: SamplingMetadata, slots: np.ndarray, positions: np.ndarray) -> None:
        if self._ops.draws and metadata.columns is not None:
            return
        # One array of 8-byte values, so that one copy brings everything to the device.
        packed = np.empty((COLUMN_LINES, len(slots)), dtype=np.int64)
        if self._ops.draws:
            self.fill_columns(packed, slots, positions)
            metadata.columns = upload(packed, self.device)
            return
        bucket = self._bucket[slots]
        order = np.argsort(bucket, kind="stable")
        self.fill_columns(packed, slots[order], positions[order], order)
        uploaded = upload(packed, self.device)
        if metadata.columns is None:
            metadata.columns = uploaded
        sizes = np.bincount(bucket, minlength=_NUM_BUCKETS)
        metadata.greedy_rows = uploaded[0, : sizes[0]]
        top_k, top_p, min_p = packed[2], packed[4].view(np.float64), packed[5].view(np.float64)
        end = int(sizes[0])
        for index in range(1, _NUM_BUCKETS):
            start, end = end, end + int(sizes[index])
            if start == end:
                continue
            part, rows = uploaded[:, start:end], order[start:end]
            keys = part[1].contiguous().view(torch.int32).view(-1, 2)
            reals = part[3:6].view(torch.float64).unsqueeze(-1)
            metadata.random_groups.append(
                RandomGroup(
                    rows=part[0],
                    start=int(rows[0]) if rows[-1] - rows[0] == end - start - 1 else -1,
                    keys=(keys[:, :1], keys[:, 1:]),
                    inverse_temperature=reals[0].float(),
                    max_top_k=int(top_k[start:end].max()) if index > _NARROWED else 0,
                    top_k=part[2].unsqueeze(-1),
                    top_p=reals[1] if (top_p[start:end] < 1.0).any() else None,
                    min_p=reals[2].float() if min_p[start:end].any() else None,
                )
            )

    def _add_edits(self, metadata: SamplingMetadata, flags: np.ndarray, batch: RowBatch, has_tokens: bool) -> None:
        for flag, rule in self._rules:
            rows = np.flatnonzero(flags & flag)
            if not len(rows):
                continue
            if rule.reads_tokens and not has_tokens:
                raise ValueError(
                    f"token_ids is None, but {type(rule).__name__} reads the tokens of its rows: "
                    "pass the array that holds the tokens of all slots"
                )
            edit = rule.prepare(batch if len(rows) == len(flags) else batch.take(rows))
            if edit is not None:
                edits: list[Any] = metadata.masks if rule.is_mask else metadata.edits
                edits.append(edit)


def _first_positions(slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64[R]: position of the first of the consecutive rows that have the same slot."""
    starts = np.flatnonzero(slots[1:] != slots[:-1]) + 1
    if len(starts) >= len(slots) - 1:  # one row each
        return positions
    starts = np.append(0, starts)
    return np.repeat(positions[starts], np.diff(starts, append=len(slots)))


def sampling_metadata(
    rows: Sequence[SampleRow],
    vocab_size: int,
    device: torch.device | str = "cpu",
    rules: Sequence[type[LogitsRule]] = RULES,
    ops: SamplingOps = REFERENCE,
) -> SamplingMetadata:
    """Describe rows without keeping a table: for one-off calls; a step loop keeps a `SamplingTable`."""
    table = SamplingTable(len(rows), vocab_size, device, rules, ops)
    token_ids = np.zeros((len(rows), max((row.position for row in rows), default=0)), dtype=np.int32)
    for slot, row in enumerate(rows):
        table.set_row(slot, row.params, row.seed, row.eos_token_ids, len(row.prompt_token_ids))
        token_ids[slot, : row.position] = np.concatenate([row.prompt_token_ids, row.output_token_ids])
    positions = np.array([row.position for row in rows], dtype=np.int64)
    return table.select(np.arange(len(rows)), positions, token_ids, history=upload(token_ids, table.device))
