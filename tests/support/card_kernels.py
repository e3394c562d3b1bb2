"""Kernels of an emulated card that are functions of torch, each launched as one kernel, as the GPU's are.

They compute what the references compute, when the card comes to them, and are many times faster than kernels of the
Triton language in the interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from emulated_card import launch_function
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerAttention, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.ops.base import Angles, HeadNorms, QuantizedRows, Rows
from inflight.ops.reference_ops import ReferenceOps, rotate_and_write_in_parts
from inflight.runner import step_inputs
from inflight.runner.step_inputs import DeviceState, StepInputTensors, StepSize
from inflight.sampling.choose import draw
from inflight.sampling.metadata import Kind, RandomGroup
from inflight.sampling.ops import CountedRows, MatchedWords
from inflight.sampling.reference_sampling import REFERENCE, ReferenceSampling
from inflight.sampling.unusable import NO_TOKEN

__all__ = ["CardAttention", "CardOps", "CardSampling", "make_inputs", "put_tokens"]


class CardAttention(ReferenceAttention):
    """The reference, which reads lengths when the card comes to it, as a kernel does."""

    capturable = True

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: AttentionMetadata) -> None:
        for x, pool in ((key, cache.key), (value, cache.value)):
            launch_function(_write, x, pool, batch.slot_mapping)

    def attend(
        self, query: Tensor, cache: KVCache, batch: AttentionMetadata, spec: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        out = query.new_empty(*query.shape[:2], spec.value_head_size)
        lengths = batch.query_start_loc, batch.seq_lens, batch.block_table
        launch_function(_attend, out, query, cache.key, cache.value, *lengths, batch.block_size, spec, sinks)
        return out


def _write(x: Tensor, pool: Tensor, slot_mapping: Tensor) -> None:
    mapped = slot_mapping >= 0
    pool.flatten(0, 1).index_copy_(0, slot_mapping[mapped], x[mapped])


def _attend(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    spec: LayerSpec,
    sinks: Tensor | None,
) -> None:
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    tokens: Any = None
    batch = AttentionMetadata(
        query_start_loc, seq_lens, block_table, tokens, starts, lengths, 0, max(lengths), block_size
    )
    out.copy_(ReferenceAttention().attend(query, KVCache(key, value), batch, spec, sinks))


class CardOps(ReferenceOps):
    """The reference, each operation one launch."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, quantized: bool = False) -> Rows:
        return _rows(x.shape, x, quantized, "rms_norm", x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float = 1.0, quantized: bool = False
    ) -> Rows:
        return _rows(residual.shape, residual, quantized, "add_rms_norm", x, residual, weight, eps, factor)

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        launch_function(ReferenceOps().rotary, query, key, cos, sin)

    def rotate_and_write(
        self, qkv: Tensor, layer: LayerAttention, batch: Any, norms: HeadNorms | None, angles: Angles | None
    ) -> Tensor:
        if not isinstance(batch, AttentionMetadata):  # parts of a model are being recognised
            return rotate_and_write_in_parts(self, qkv, layer, batch, norms, angles)
        spec, pools = layer.spec, (layer.cache.key, layer.cache.value)
        query = qkv.new_empty(len(qkv), spec.num_heads, spec.key_head_size)
        weights = norms and (norms.query_weight, norms.key_weight, norms.eps)
        tables = angles and (angles.cos, angles.sin, angles.size, angles.positions)
        launch_function(_rotate_and_write, query, qkv, pools, batch.slot_mapping, spec, weights, tables)
        return query

    def silu_and_mul(self, gate_up: Tensor, quantized: bool = False) -> Rows:
        shape = *gate_up.shape[:-1], gate_up.shape[-1] // 2
        return _rows(shape, gate_up, quantized, "silu_and_mul", gate_up)

    def quantize_rows(self, x: Tensor) -> QuantizedRows:
        made = _new_quantized(x.shape, x)
        launch_function(_quantize, made.values, made.scales, x)
        return made


def _rows(shape: Any, like: Tensor, quantized: bool, name: str, *args: Any) -> Rows:
    """The rows that the reference's operation `name` computes."""
    out = like.new_empty(shape)
    if not quantized:
        launch_function(_compute, out, name, *args)
        return out
    made = _new_quantized(shape, like)
    launch_function(_compute_quantized, made.values, made.scales, name, *args)
    return made


def _new_quantized(shape: Any, like: Tensor) -> QuantizedRows:
    values = like.new_empty(shape, dtype=torch.float8_e4m3fn)
    return QuantizedRows(values, like.new_empty(shape[:-1], dtype=torch.float32))


def _compute(out: Tensor, name: str, *args: Any) -> None:
    out.copy_(getattr(ReferenceOps(), name)(*args))


def _compute_quantized(values: Tensor, scales: Tensor, name: str, *args: Any) -> None:
    _quantize(values, scales, getattr(ReferenceOps(), name)(*args))


def _quantize(values: Tensor, scales: Tensor, x: Tensor) -> None:
    made = ReferenceOps().quantize_rows(x)
    values.copy_(made.values)
    scales.copy_(made.scales)


def _rotate_and_write(
    query: Tensor, qkv: Tensor, pools: Any, slot_mapping: Tensor, spec: LayerSpec, norms: Any, angles: Any
) -> None:
    def write(key: Tensor, value: Tensor, cache: Any, batch: Any) -> None:
        for x, pool in zip((key, value), pools):
            _write(x, pool, slot_mapping)

    layer: Any = SimpleNamespace(spec=spec, backend=SimpleNamespace(write=write), cache=None)
    made = norms and HeadNorms(*norms), angles and Angles(*angles)
    query.copy_(ReferenceOps().rotate_and_write(qkv, layer, None, *made))


class CardSampling(ReferenceSampling):
    """The reference, each operation one launch."""

    draws = True

    def choose(self, logits: Tensor, columns: Tensor, marks: bool = True, bitmask: Any = None) -> Tensor:
        assert bitmask is None
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        launch_function(_choose, out, logits, columns, marks)
        return out

    def count_and_penalise(self, logits: Tensor, counted: CountedRows) -> None:
        arguments = counted.table.counts, counted.history, counted.strengths
        launch_function(_count_and_penalise, logits, *arguments, counted.rows.copy())

    def ban_words(self, logits: Tensor, matched: MatchedWords) -> None:
        arguments = matched.table.words, matched.table.tokens, matched.history
        launch_function(_ban_words, logits, *arguments, matched.rows.copy(), matched.longest)


def _count_and_penalise(logits: Tensor, counts: Tensor, history: Tensor, strengths: Tensor, rows: np.ndarray) -> None:
    table = SimpleNamespace(counts=counts)
    counted: Any = SimpleNamespace(table=table, history=history, strengths=strengths, rows=rows)
    REFERENCE.count_and_penalise(logits, counted)


def _ban_words(logits: Tensor, words: Tensor, tokens: Tensor, history: Tensor, rows: np.ndarray, longest: int) -> None:
    table = SimpleNamespace(words=words, tokens=tokens)
    matched: Any = SimpleNamespace(table=table, history=history, rows=rows, longest=longest)
    REFERENCE.ban_words(logits, matched)


def _choose(out: Tensor, logits: Tensor, columns: Tensor, marks: bool) -> None:
    """`gpu_sampler.choose`, column after column, by the code that samples on a CPU."""
    for column in columns.T.contiguous():
        row, kind, top_k = int(column[0]), int(column[6]), int(column[2])
        reals = column[3:6].view(torch.float64).view(3, 1, 1)
        keys = column[1:2].view(torch.int32).view(2, 1, 1)
        if kind == Kind.PADDING:
            continue
        if marks and not logits[row].amax().isfinite():
            out[row] = NO_TOKEN
            continue
        if kind == Kind.GREEDY:
            out[row] = logits[row].argmax()
            continue
        group = RandomGroup(
            rows=column[:1],
            start=row,
            keys=(keys[0], keys[1]),
            inverse_temperature=reals[0].float(),
            max_top_k=top_k if kind == Kind.TOP_K else 0,
            top_k=column[2:3, None],
            top_p=reals[1] if reals[1] < 1 else None,
            min_p=reals[2].float() if reals[2] > 0 else None,
        )
        (out[row],), _ = draw(logits.float(), group)


def make_inputs(
    size: StepSize, lines: Tensor, new_blocks: Tensor, new_tokens: Tensor, state: DeviceState, out: StepInputTensors
) -> None:
    """In place of `gpu_step_inputs.make_inputs`."""
    made = out.input_ids, out.positions, out.slot_mapping, out.block_table, out.logits_indices, out.sample_indices
    kept = state.token_ids, state.block_table
    launch_function(_make_inputs, size, lines, new_blocks, new_tokens, kept, state.block_size, made)


def _make_inputs(
    size: StepSize, lines: Tensor, new_blocks: Tensor, new_tokens: Tensor, kept: Any, block_size: int, made: Any
) -> None:
    token_ids, block_table = kept
    state, out = DeviceState(token_ids, block_table, block_size), StepInputTensors(*made)
    step_inputs.make_inputs(size, lines, new_blocks, new_tokens, state, out)


def put_tokens(token_ids: Tensor, sample_indices: Tensor, sampled: Tensor) -> None:
    """In place of `gpu_step_inputs.put_tokens`."""
    launch_function(step_inputs.put_tokens, token_ids, sample_indices, sampled)
