"""Grids of the largest legal steps: CUDA takes 2^31 - 1 programs along the first axis, 65,535 along the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launches import Launches
from torch import Tensor

pytest.importorskip("triton")

from inflight.attention.base import AttentionMetadata, LayerSpec
from inflight.kernels.gpu import gpu_bad_words, gpu_bitmask, gpu_penalties, gpu_sampler, gpu_step_inputs
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_attention_configs import Card
from inflight.kernels.gpu.gpu_ops import GpuOps
from inflight.kernels.gpu.gpu_rotate_and_write import rotate_and_write
from inflight.kernels.gpu.launch import interpreted
from inflight.ops.base import Angles, projection_sizes
from inflight.runner.step_inputs import DeviceState, Line, StepInputTensors, StepSize
from inflight.sampling.metadata import COLUMN_LINES

pytestmark = pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here")

META = torch.device("meta")
TOKENS, ROWS = 2**18, 4096  # twice the longest context of common models; the limit of max_num_seqs
VOCAB = 2**18


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def step(num_requests: int, max_query_len: int) -> AttentionMetadata:
    starts, lengths = [0] * (num_requests + 1), [1] * num_requests  # which no grid depends on
    tensors = meta(num_requests + 1), meta(num_requests), meta(num_requests, 4), meta(TOKENS, dtype=torch.int64)
    return AttentionMetadata(*tensors, starts, lengths, max_query_len, TOKENS, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 1), (8, 8), (128, 128), (128, 4)])
def test_attention(monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """One prompt, prompts and decodes side by side, decodes with drafts."""
    backend = GpuAttention(Card((9, 0), 132, 227 * 1024))
    spec = LayerSpec(heads, kv_heads, 128, 128, scaling=0.1)
    cache = backend.new_cache(4, 16, spec, dtype, META)
    query, key, value = (meta(TOKENS, count, 128, dtype=dtype) for count in (heads, kv_heads, kv_heads))
    qkv = meta(TOKENS, sum(projection_sizes(spec)), dtype=dtype)
    angles = Angles(*(meta(TOKENS, 64, dtype=dtype) for _ in range(2)), 128)
    with Launches(monkeypatch) as launches:
        for metadata in (step(1, TOKENS), step(ROWS, TOKENS), step(ROWS, TOKENS // ROWS)):
            batch = backend.prepare(metadata)
            backend.write(key, value, cache, batch)
            backend.attend(query, cache, batch, spec, None)
            rotate_and_write(qkv, spec, cache, metadata, None, angles)
    assert set(launches.names) > {"attend_kernel", "plan_kernel", "reduce_kernel", "rotate_and_write_kernel"}


def test_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, wide = GpuOps(), meta(TOKENS, 2**16, dtype=torch.bfloat16)
    query, angle = meta(TOKENS, 128, 128, dtype=torch.bfloat16), meta(TOKENS, 128, dtype=torch.bfloat16)
    with Launches(monkeypatch) as launches:
        fused.rms_norm(wide, wide[0], 1e-5)
        fused.add_rms_norm(wide, wide, wide[0], 1e-5)
        fused.silu_and_mul(wide)
        fused.rotary(query, query, angle, angle)
    assert len(launches.names) == 4


def test_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    state = DeviceState.allocate(ROWS, TOKENS, 1, META)
    inputs = StepInputTensors.allocate(TOKENS, state)
    size = StepSize(ROWS, TOKENS, TOKENS, TOKENS, TOKENS)
    lines, column = meta(len(Line), ROWS + 4), meta(TOKENS, dtype=torch.int64)
    with Launches(monkeypatch) as launches:
        gpu_step_inputs.make_inputs(size, lines, meta(TOKENS), meta(TOKENS), state, inputs)
        gpu_step_inputs.put_tokens(state.token_ids, column, column)
    assert launches.names == ["step_inputs_kernel", "put_tokens_kernel"]


def test_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token for each of the step's, as with drafts, and a million bad words."""
    monkeypatch.setattr(gpu_sampler, "token_hashes", lambda vocab_size, device: meta(vocab_size))
    logits, rows = meta(TOKENS, VOCAB, dtype=torch.float32), meta(7, TOKENS)
    counted: Any = SimpleNamespace(
        table=SimpleNamespace(counts=meta(ROWS, VOCAB)), device_rows=meta(8, TOKENS), history=meta(ROWS, TOKENS),
        strengths=meta(3, TOKENS, dtype=torch.float32),
    )  # fmt: skip
    penalised: Any = SimpleNamespace(
        index=meta(2**30, dtype=torch.int64), counts=meta(2**30), columns=meta(2**30), strengths=counted.strengths
    )
    table = SimpleNamespace(words=meta(3, 2**20), tokens=meta(2**20))
    matched: Any = SimpleNamespace(device_rows=rows, table=table, history=counted.history, max_words=2**20, longest=100)
    with Launches(monkeypatch) as launches:
        gpu_sampler.choose(logits, meta(COLUMN_LINES, TOKENS, dtype=torch.int64))
        gpu_bitmask.apply(logits, meta(TOKENS, dtype=torch.int64), meta(TOKENS, VOCAB // 32))
        gpu_penalties.penalise(logits, penalised)
        gpu_penalties.count_and_penalise(logits, counted)
        gpu_bad_words.ban(logits, matched)
    assert len(launches.names) == 6
