"""Experts, and block-scaled fp8 weights, on a GPU: right, the same bits every time, and replayable."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from card_sizes import sized
from experts_case import mxfp4_weights, plain_weights, routings
from paged_case import relative_error
from torch import Tensor

from inflight.kernels.gpu.gpu_block_fp8 import GpuBlockFp8
from inflight.kernels.gpu.gpu_experts import GpuExperts
from inflight.loading.quantization.block_fp8_linear import BlockFp8Linear
from inflight.ops.experts import ExpertProducts, ExpertWeights, SwiGlu, reference_experts

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]
EXPERTS, HIDDEN, INNER = sized((8, 160, 96), (4, 96, 32))  # bench/gpu_experts.py checks those of real models
ROUTINGS = routings(EXPERTS, sized(4, 2))


def products(packed: bool, dtype: torch.dtype) -> ExpertProducts:
    make = mxfp4_weights if packed else plain_weights
    parts = [make(EXPERTS, 2 * INNER, HIDDEN, dtype), make(EXPERTS, HIDDEN, INNER, dtype, 1)]
    on_card = [
        ExpertWeights(
            part.values.to(CUDA),
            None if part.scales is None else part.scales.to(CUDA),
            None if part.bias is None else part.bias.to(CUDA),
        )
        for part in parts
    ]
    return ExpertProducts(on_card[0], on_card[1], SwiGlu(True, 7.0, 1.702) if packed else SwiGlu())


def inputs(index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(len(index), HIDDEN, generator=generator), torch.rand(index.shape, generator=generator)
    return x.to(CUDA, dtype), index.to(CUDA), weights.to(CUDA, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [True, False], ids=["mxfp4", "plain"])
def test_experts_are_right_and_bits_repeat(packed: bool, dtype: torch.dtype) -> None:
    experts = products(packed, dtype)
    many = torch.cat([ROUTINGS["many tokens"]] * 4)  # tiles of 128 rows
    for index in (*ROUTINGS.values(), many):
        x, index, weights = inputs(index, dtype)
        exact = reference_experts(x.float(), experts, index, weights.float())
        out = GpuExperts().experts(x, experts, index, weights)
        assert relative_error(out, exact) < 0.01
        assert torch.equal(GpuExperts().experts(x, experts, index, weights), out)


def test_a_graph_serves_any_routing() -> None:
    experts, dtype = products(True, torch.bfloat16), torch.bfloat16
    x, index, weights = inputs(ROUTINGS["all tokens to the same experts"], dtype)
    GpuExperts().experts(x, experts, index, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = GpuExperts().experts(x, experts, index, weights)
    for shift in range(3):
        index.copy_((index + shift * torch.arange(len(index), device=CUDA)[:, None]) % EXPERTS)
        graph.replay()
        exact = reference_experts(x.float(), experts, index, weights.float())
        assert relative_error(out, exact) < 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "size"), [(320, 512), (200, 144)])
def test_products_with_block_scales_are_right(outputs: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, size, device=CUDA).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-outputs // 128), -(-size // 128), device=CUDA) / 1000
    layer = BlockFp8Linear(weight, scale, (128, 128), None, dtype, GpuBlockFp8())
    for rows in (1, 17, 300):
        x = torch.randn(rows, size, device=CUDA).to(dtype)
        exact = x.double() @ layer.dequantised(torch.float32).double().t()
        assert relative_error(layer(x), exact) < 0.006
        assert torch.equal(layer(x), layer(x))
