"""Norms of heads, rotary embedding and KV write in one kernel: bitwise what the separate ones compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nightly import nightly_but

pytest.importorskip("triton")

from inflight.attention.base import AttentionMetadata, LayerAttention, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.kernels.gpu import gpu_ops, gpu_rotate_and_write
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_ops import GpuOps
from inflight.ops.base import Angles, HeadNorms, projection_sizes
from inflight.ops.reference_ops import ReferenceOps, rotate_and_write_in_parts

pytestmark = pytest.mark.usefixtures("gpu_rounding")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE, NUM_BLOCKS, POSITIONS = 4, 6, 32
SLOTS = [9, -1, 22, 3, -1]  # of five tokens; two are padding
kernels = GpuOps()


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def spec_of(heads: int, kv_heads: int, key_size: int, value_size: int, fp8: bool = False) -> LayerSpec:
    kv_dtype = torch.float8_e4m3fn if fp8 else None
    return LayerSpec(heads, kv_heads, key_size, value_size, key_size**-0.5, kv_cache_dtype=kv_dtype)


def metadata_of(slots: list[int]) -> AttentionMetadata:
    count = len(slots)
    start = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(count, 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.ones(count, dtype=torch.int32, device=DEVICE)
    mapping = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    return AttentionMetadata(start, lengths, table, mapping, list(range(count + 1)), [1] * count, 1, 1, BLOCK_SIZE)


def layer_of(spec: LayerSpec, dtype: torch.dtype) -> LayerAttention:
    """With a pool full of a number that nothing here computes."""
    backend = GpuAttention()
    cache: Any = backend.new_cache(NUM_BLOCKS, BLOCK_SIZE, spec, dtype, DEVICE)
    for pool in (cache.key, cache.value):
        pool.view(torch.uint8).fill_(0x5B)
    if cache.key_scale is not None:
        cache.key_scale = torch.linspace(0.01, 0.02, spec.num_kv_heads, device=DEVICE)
        cache.value_scale = torch.linspace(0.001, 0.03, spec.num_kv_heads, device=DEVICE)  # the first ones saturate
    return LayerAttention(spec, backend, cache)


def angles_of(rotated: int, dtype: torch.dtype, kind: str) -> Angles | None:
    if kind == "none":
        return None
    rows, width = (POSITIONS, rotated // 2) if kind == "table" else (len(SLOTS), rotated)
    cos, sin = random(2, rows, width, dtype=dtype, seed=5)
    positions = torch.tensor([7, 0, 31, 12, 0], device=DEVICE) if kind == "table" else None
    return Angles(cos, sin, rotated, positions)


def norms_of(size: int, dtype: torch.dtype) -> HeadNorms:
    return HeadNorms(random(size, dtype=dtype, seed=6), random(size, dtype=dtype, seed=7), 1e-5)


def stored(layer: LayerAttention) -> list[torch.Tensor]:
    return [layer.cache.key.view(torch.uint8), layer.cache.value.view(torch.uint8)]


@pytest.mark.parametrize("dtype", nightly_but([torch.bfloat16], DTYPES))
@pytest.mark.parametrize("kind", ["table", "by token", "none"])
@pytest.mark.parametrize(
    ("sizes", "rotated", "normed", "fp8"),
    [
        ((4, 2, 16, 16), 16, False, False),
        ((4, 2, 16, 16), 16, True, True),
        ((3, 1, 24, 24), 10, True, False),
        ((3, 1, 24, 24), 10, False, True),
        ((2, 1, 6, 20), 6, True, False),
        ((6, 5, 16, 16), 8, True, True),
    ],
    ids=str,
)
def test_bitwise_what_the_parts_compute(sizes, rotated, normed, fp8, kind, dtype, monkeypatch):
    monkeypatch.setattr(gpu_rotate_and_write, "_TILE", 64)  # at most four heads per program
    spec = spec_of(*sizes, fp8)
    ours, parts = layer_of(spec, dtype), layer_of(spec, dtype)
    qkv = random(len(SLOTS), sum(projection_sizes(spec)), dtype=dtype, seed=4) * 3
    norms = norms_of(spec.key_head_size, dtype) if normed else None
    angles = angles_of(rotated, dtype, kind)
    batch = ours.backend.prepare(metadata_of(SLOTS))
    expected = rotate_and_write_in_parts(kernels, qkv.clone(), parts, batch, norms, angles)
    query = kernels.rotate_and_write(qkv, ours, batch, norms, angles)
    assert torch.equal(query, expected)
    assert all(map(torch.equal, stored(ours), stored(parts)))
    assert int((ours.cache.key.view(torch.uint8) != 0x5B).sum()) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_the_reference_apart_from_norms(dtype):
    """Query, and what a pool of the reference's layout holds afterwards."""
    spec = spec_of(4, 2, 32, 16)
    ours, theirs = layer_of(spec, dtype), ReferenceAttention()
    cache = theirs.new_cache(NUM_BLOCKS, BLOCK_SIZE, spec, dtype, DEVICE)
    slots = [9, 22, 3]
    qkv, metadata = random(3, sum(projection_sizes(spec)), dtype=dtype, seed=4), metadata_of(slots)
    angles = Angles(*random(2, POSITIONS, 12, dtype=dtype, seed=5), 24, torch.tensor([1, 30, 0], device=DEVICE))
    reference = LayerAttention(spec, theirs, cache)
    expected = ReferenceOps().rotate_and_write(qkv.clone(), reference, metadata, None, angles)
    query = kernels.rotate_and_write(qkv, ours, ours.backend.prepare(metadata), None, angles)
    assert torch.equal(query, expected)
    for pool, right in ((ours.cache.key, cache.key), (ours.cache.value, cache.value)):
        assert torch.equal(pool.transpose(1, 2).flatten(0, 1)[slots], right.flatten(0, 1)[slots])


def test_one_launch_on_a_gpus_cache_and_parts_on_others(monkeypatch):
    launches = []
    fused = gpu_ops.rotate_and_write
    monkeypatch.setattr(gpu_ops, "rotate_and_write", lambda *args: launches.append(args) or fused(*args))
    spec = spec_of(4, 2, 16, 16)
    layer = layer_of(spec, torch.float32)
    qkv = random(2, sum(projection_sizes(spec)), dtype=torch.float32, seed=4)
    metadata = metadata_of([1, 2])
    batches = layer.backend.prepare(metadata), metadata  # the plain batch is that of other backends with this pool
    results = [kernels.rotate_and_write(qkv.clone(), layer, batch, None, None) for batch in batches]
    assert len(launches) == 2
    backend = ReferenceAttention()
    cache = backend.new_cache(NUM_BLOCKS, BLOCK_SIZE, spec, torch.float32, DEVICE)
    other = LayerAttention(spec, backend, cache)
    results.append(kernels.rotate_and_write(qkv.clone(), other, metadata, None, None))
    assert len(launches) == 2
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_query_is_contiguous_and_no_tokens_are_no_launch():
    spec = spec_of(4, 2, 16, 16)
    layer = layer_of(spec, torch.float32)
    qkv = random(5, sum(projection_sizes(spec)), dtype=torch.float32, seed=4)
    before = qkv.clone()
    batch = layer.backend.prepare(metadata_of(SLOTS))
    query = kernels.rotate_and_write(qkv, layer, batch, None, angles_of(16, torch.float32, "table"))
    assert query.is_contiguous()
    assert torch.equal(qkv, before)
    assert kernels.rotate_and_write(qkv[:0], layer, batch, None, None).shape == (0, 4, 16)


@pytest.mark.parametrize("size", [7, 18])
def test_a_rotation_that_no_head_has_is_refused(size):
    spec = spec_of(4, 2, 16, 16)
    layer = layer_of(spec, torch.float32)
    angles = replace(angles_of(16, torch.float32, "by token"), size=size)
    qkv = random(5, sum(projection_sizes(spec)), dtype=torch.float32, seed=4)
    with pytest.raises(ValueError, match=f"{size} elements are rotated; an even number up to 16"):
        kernels.rotate_and_write(qkv, layer, layer.backend.prepare(metadata_of(SLOTS)), None, angles)
