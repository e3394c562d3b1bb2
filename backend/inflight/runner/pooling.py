"""Vectors in place of tokens: the hidden states that a step's rows need, their sums, and the vectors made of them.

The hidden states that a vector is made of are summed by slot, in float64 and in the order of their tokens, so that a
mean depends on neither chunks nor neighbours: of all tokens for "mean", of the first one for "cls", of the last one for
"last".  A sum begins at its request's first position: such requests have no prefix of another's, and are never swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from inflight.device.batch_state import StepInputs
from inflight.engine.pooling import Pooling
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.loading.pooler import Pooler

__all__ = ["PendingVectors", "PooledRows", "RowPooling"]

_NOTHING = np.empty(0, dtype=np.int64)
_VOID = 0  # the token that the scheduler counts

UNUSABLE_VECTOR = (
    "the model's vector for this request is not finite (NaN or infinity): its weights contain NaN, or its arithmetic "
    'overflowed; check the checkpoint, or set "dtype": "float32" in model.json'
)


@dataclass(slots=True)
class PooledRows:
    """The part of a step's rows in vectors; on the host.

    Attributes:
        indices: int64 [P]; tokens among the step's T whose hidden states are read.
        slots: int64 [P]; whose sum each is added to.
        begun: int64; slots whose sums begin.
        ended: row -> its slot, the number of tokens in its sum, and what it asks for.
        failures: row -> why it yields no vector.
    """

    indices: np.ndarray = field(default_factory=lambda: _NOTHING)
    slots: np.ndarray = field(default_factory=lambda: _NOTHING)
    begun: np.ndarray = field(default_factory=lambda: _NOTHING)
    ended: dict[int, tuple[int, int, Pooling]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def without_tokens(self) -> set[int]:
        """The rows that need no logits."""
        return {*self.ended, *self.failures}

    def without_logits(self, out: SchedulerOutput) -> SchedulerOutput:
        """The step without logits for the rows that yield vectors."""
        if not (without := self.without_tokens):
            return out
        samples = [sample and row not in without for row, sample in enumerate(out.samples)]
        return msgspec.structs.replace(out, samples=samples)


@dataclass(slots=True)
class PendingVectors:
    """Vectors on their way to the host.

    Attributes:
        parts: rows, and float32 [rows, D].
        failures: row -> why it yields none.
    """

    parts: list[tuple[list[int], Tensor]] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)

    def give(self, step: StepOutput) -> None:
        """Put them into `step`.  Call it when the device has ended the step."""
        step.row_failures.update(self.failures)
        for rows, vectors in self.parts:
            values = vectors.numpy()
            finite = np.isfinite(values).all(axis=1)
            for row, value, is_finite in zip(rows, values, finite):
                if is_finite:
                    step.token_ids[row], step.pooled[row] = _VOID, value.tobytes()
                else:
                    step.row_failures[row] = UNUSABLE_VECTOR


class RowPooling:
    """Remembers which slots ask for vectors, and their sums.

    Args:
        pooler: of the checkpoint.
    """

    def __init__(self, pooler: Pooler, max_num_seqs: int, device: torch.device) -> None:
        self._pooler = pooler
        self._max_num_seqs = max_num_seqs
        self._device = device
        self._sums: Tensor | None = None
        self._of_slot: dict[int, Pooling] = {}

    def fill_rows(self, out: SchedulerOutput) -> None:
        """Remember which of the entering rows ask; once per step."""
        for row in out.new_rows:
            self._of_slot.pop(row.slot, None)
            if row.attached is not None and row.attached.pooling is not None:
                self._of_slot[row.slot] = row.attached.pooling

    def rows(self, out: SchedulerOutput, starts: Sequence[int]) -> PooledRows:
        """The part of the step's rows; call `fill_rows` first.  `starts` is `query_start_loc`."""
        found = PooledRows()
        indices, slots, begun = [], [], []
        for row, slot in enumerate(out.slots if self._of_slot else ()):
            if (pooling := self._of_slot.get(slot)) is None:
                continue
            if pooling.task not in self._pooler.facts.tasks:
                found.failures[row] = f"{pooling.task!r} is no task of this checkpoint"
                continue
            first, count = out.num_computed_tokens[row], out.num_scheduled_tokens[row]
            start, end = starts[row], starts[row] + count
            if pooling.kind == "last":
                if not out.samples[row]:
                    continue
                start, first = end - 1, 0  # its sum begins with the last token
            elif pooling.kind == "cls":
                end = start + (first == 0)
            indices.append(np.arange(start, end))
            slots.append(np.full(end - start, slot))
            if first == 0:
                begun.append(slot)
            if out.samples[row]:
                total = out.num_computed_tokens[row] + count if pooling.kind == "mean" else 1
                found.ended[row] = slot, total, pooling
        if indices:
            found.indices, found.slots = np.concatenate(indices), np.concatenate(slots)
            found.begun = np.array(begun, dtype=np.int64)
        return found

    def split(self, out: SchedulerOutput, inputs: StepInputs) -> tuple[StepInputs, PooledRows]:
        """The inputs without logits for the rows that yield vectors, and the part of those rows; as `rows`."""
        pooled = self.rows(out, inputs.metadata.query_start_loc_cpu)
        if not pooled.without_tokens:
            return inputs, pooled
        kept = ~np.isin(inputs.row_of_logits, list(pooled.without_tokens))
        rows, indices = inputs.row_of_logits[kept], inputs.logits_indices[kept]
        tokens = inputs.slot_of_token, inputs.position_of_token
        return StepInputs(*tokens, rows, indices, inputs.positions, inputs.metadata), pooled

    @torch.inference_mode()
    def launch(self, rows: PooledRows, hidden: Tensor) -> PendingVectors:
        """Add the hidden states [P, H] of `rows.indices`, and start making the vectors of the rows that end.

        The last act of a step: one that has raised before can be made again.
        """
        if len(rows.indices):
            if self._sums is None:
                self._sums = torch.zeros(self._max_num_seqs, hidden.shape[1], dtype=torch.float64, device=self._device)
            self._sums[self._put(rows.begun)] = 0.0
            self._sums.index_add_(0, self._put(rows.slots), hidden.double())
        by_pooling: dict[Pooling, list[int]] = {}
        for row, (_, _, pooling) in rows.ended.items():
            by_pooling.setdefault(pooling, []).append(row)
        parts = [(each, self._vectors(rows, each, pooling)) for pooling, each in by_pooling.items()]
        return PendingVectors(parts, rows.failures)

    def _vectors(self, rows: PooledRows, each: list[int], pooling: Pooling) -> Tensor:
        """float32 [len(each), D], on its way to the host."""
        assert self._sums is not None
        slots, counts, _ = zip(*(rows.ended[row] for row in each))
        means = self._sums[self._put(np.array(slots))] / self._put(np.array(counts))[:, None]
        vectors = self._pooler(means.float(), pooling)
        if vectors.device.type == "cpu":
            return vectors.contiguous()
        host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
        return host.copy_(vectors, non_blocking=True)

    def _put(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
