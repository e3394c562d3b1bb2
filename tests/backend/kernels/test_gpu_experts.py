"""Experts by the kernels in the Triton language, compared with transformers' own: plain weights, and four bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts_case import mxfp4_weights, plain_weights, routings
from launches import Launches, to_meta
from paged_case import relative_error
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

pytest.importorskip("triton")

from inflight.kernels.gpu import gpu_experts
from inflight.kernels.gpu.gpu_experts import GpuExperts
from inflight.kernels.gpu.launch import interpreted
from inflight.ops.experts import ExpertProducts, ExpertWeights, SwiGlu, reference_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="there is neither a GPU nor an interpreter"),
    pytest.mark.usefixtures("gpu_rounding"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, on infinities in the interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
EXPERTS, HIDDEN, INNER = 6, 160, 96
GPT_OSS = SwiGlu(interleaved=True, limit=7.0, alpha=1.702)
ROUTINGS = routings(EXPERTS, 2)
EXACT, HALF = 1e-5, 0.01


def routing_weights(index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(index.shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def tokens(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


def mxfp4_experts(dtype: torch.dtype) -> ExpertProducts:
    gate_up = mxfp4_weights(EXPERTS, 2 * INNER, HIDDEN, dtype)
    return ExpertProducts(gate_up, mxfp4_weights(EXPERTS, HIDDEN, INNER, dtype, 1), GPT_OSS)


def on_device(experts: ExpertProducts) -> ExpertProducts:
    def moved(part: ExpertWeights) -> ExpertWeights:
        tensors = part.values, part.scales, part.bias
        return ExpertWeights(*(None if tensor is None else tensor.to(DEVICE) for tensor in tensors))

    return ExpertProducts(moved(experts.gate_up), moved(experts.down), experts.gate)


def by_kernels(x: torch.Tensor, experts: ExpertProducts, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    assert GpuExperts().unsupported(experts, x.dtype) is None
    out = GpuExperts().experts(x.to(DEVICE), on_device(experts), index.to(DEVICE), weights.to(DEVICE))
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    return out.cpu()


def by_transformers(module: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    module.config._experts_implementation = "eager"
    with torch.no_grad():
        return module(x, index, weights)


@torch.no_grad()
def gpt_oss(experts: ExpertProducts, dtype: torch.dtype) -> GptOssExperts:
    """transformers' module with the same numbers; those in four bits unpacked by transformers."""
    config = GptOssConfig(num_local_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INNER)
    module = GptOssExperts(config).to(dtype)
    for name, part in (("gate_up_proj", experts.gate_up), ("down_proj", experts.down)):
        assert part.bias is not None
        plain = part.values.transpose(1, 2)
        if part.scales is not None:
            blocks = part.values.view(*part.scales.shape, 16)
            plain = convert_moe_packed_tensors(blocks, part.scales, dtype=dtype)
        getattr(module, name).copy_(plain)
        getattr(module, f"{name}_bias").copy_(part.bias)
    return module


@torch.no_grad()
def concatenated(module: Any, gate_up: ExpertWeights, down: ExpertWeights, dtype: torch.dtype) -> Any:
    module.gate_up_proj.copy_(gate_up.values)
    module.down_proj.copy_(down.values)
    return module.to(dtype)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_four_bits_are_transformers_numbers(routing: str) -> None:
    """In bfloat16, against the same experts in float32: the error is that of transformers' bfloat16, or less."""
    index, dtype = ROUTINGS[routing], torch.bfloat16
    experts, x, weights = mxfp4_experts(dtype), tokens(len(index), dtype), routing_weights(index, dtype)
    exact = by_transformers(gpt_oss(experts, torch.float32), x.float(), index, weights.float())
    theirs = relative_error(by_transformers(gpt_oss(experts, dtype), x, index, weights), exact)
    assert relative_error(by_kernels(x, experts, index, weights), exact) <= max(theirs, 0.004) < HALF


def test_four_bits_in_float16() -> None:
    index, dtype = ROUTINGS["uneven"], torch.float16
    experts, x, weights = mxfp4_experts(dtype), tokens(len(index), dtype), routing_weights(index, dtype)
    exact = by_transformers(gpt_oss(experts, torch.float32), x.float(), index, weights.float())
    assert relative_error(by_kernels(x, experts, index, weights), exact) < 0.002


@pytest.mark.parametrize("tile", gpu_experts._TILES[1:], ids=lambda tile: f"{tile.rows} rows")
def test_every_tile_computes_the_same(tile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index, dtype = ROUTINGS["uneven"], torch.bfloat16
    experts, x, weights = mxfp4_experts(dtype), tokens(len(index), dtype), routing_weights(index, dtype)
    expected = by_kernels(x, experts, index, weights)
    monkeypatch.setattr(gpu_experts, "_TILES", (tile,))
    assert relative_error(by_kernels(x, experts, index, weights), expected) < 0.002


def test_a_step_takes_the_tile_that_an_experts_share_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(gpu_experts, "_experts", lambda x, experts, index, weights, tile: taken.append(tile.rows))
    for count in (1, 64 * EXPERTS // 2 - 1, 64 * EXPERTS // 2, 128 * EXPERTS // 2, 4096):
        index = torch.zeros(count, 2, dtype=torch.int64)
        GpuExperts().experts(tokens(1, torch.bfloat16), mxfp4_experts(torch.bfloat16), index, index)
    assert taken == [16, 16, 64, 128, 128]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_code_and_scale_is_exact(dtype: torch.dtype) -> None:
    """Tokens that select one input each, times 1: what comes out is the weight, bit for bit."""
    size = 64
    one_hot = torch.eye(size)
    first = ExpertWeights(torch.cat([64 * one_hot, one_hot / 64])[None].to(dtype))  # silu(64) = 64
    values = torch.arange(16).repeat(size, 2)[:, torch.randperm(32, generator=torch.Generator().manual_seed(0))]
    values = (values | values.flip(0) << 4).to(torch.uint8)[None]
    # No weight is subnormal, which a CPU may count as 0, and none overflows.
    smallest, largest = (2, 252) if dtype == torch.bfloat16 else (127 - 13, 127 + 13)
    scales = torch.linspace(smallest, largest, 2 * size).round().to(torch.uint8).view(1, size, 2)
    experts = ExpertProducts(first, ExpertWeights(values, scales), SwiGlu())
    index = torch.zeros(size, 1, dtype=torch.int64)
    out = by_kernels(one_hot.to(dtype), experts, index, torch.ones(size, 1, dtype=dtype))
    expected = convert_moe_packed_tensors(values.view(1, size, 2, 16), scales, dtype=dtype)[0]
    assert torch.equal(out, expected)
    assert torch.equal(experts.down.of(0, dtype).t(), expected)


@pytest.mark.parametrize("routing", ["one token", "uneven"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, EXACT), (torch.bfloat16, HALF)], ids=str)
def test_plain_experts_of_gpt_oss(routing: str, dtype: torch.dtype, tolerance: float) -> None:
    """Transposed weights, gates between ups, biases, clamps that bite."""
    index = ROUTINGS[routing]
    parts = [mxfp4_weights(EXPERTS, *size, dtype) for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
    plain = [
        ExpertWeights(
            torch.stack([part.of(expert, dtype).t() for expert in range(EXPERTS)]).transpose(1, 2), None, part.bias
        )
        for part in parts
    ]
    experts = ExpertProducts(plain[0], plain[1], GPT_OSS)
    x, weights = tokens(len(index), dtype) * 4, routing_weights(index, dtype)
    expected = by_transformers(gpt_oss(experts, dtype), x, index, weights)
    assert relative_error(by_kernels(x, experts, index, weights), expected) < tolerance
    assert relative_error(reference_experts(x, experts, index, weights), expected) < tolerance
    unclamped = ExpertProducts(plain[0], plain[1], SwiGlu(True, 1e9, 1.702))
    assert relative_error(by_kernels(x, unclamped, index, weights), expected) > 0.1


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, EXACT), (torch.bfloat16, HALF)], ids=str)
def test_experts_of_qwen3_moe(routing: str, dtype: torch.dtype, tolerance: float) -> None:
    """Gates first, then ups; no bias."""
    index = ROUTINGS[routing]
    gate_up, down = plain_weights(EXPERTS, 2 * INNER, HIDDEN, dtype), plain_weights(EXPERTS, HIDDEN, INNER, dtype, 1)
    config = Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INNER)
    module = concatenated(Qwen3MoeExperts(config), gate_up, down, dtype)
    x, weights = tokens(len(index), dtype), routing_weights(index, dtype)
    expected = by_transformers(module, x, index, weights)
    experts = ExpertProducts(gate_up, down, SwiGlu())
    assert relative_error(by_kernels(x, experts, index, weights), expected) < tolerance
    assert relative_error(reference_experts(x, experts, index, weights), expected) < tolerance


@pytest.mark.parametrize("num_choices", [1, 4])
def test_tokens_of_no_expert_add_nothing(num_choices: int) -> None:
    dtype, index = torch.bfloat16, routings(EXPERTS, 4)["uneven"][:, :num_choices].clone()
    index[1], index[3, 0], index[5] = EXPERTS, -1, 2**40
    experts, x, weights = mxfp4_experts(dtype), tokens(len(index), dtype), routing_weights(index, dtype)
    is_expert = (index >= 0) & (index < EXPERTS)
    expected = by_kernels(x, experts, index.clamp(0, EXPERTS - 1), weights * is_expert)
    out = by_kernels(x, experts, index, weights)
    assert torch.equal(out, expected)
    assert not out[1].any()


def test_a_tokens_bits_do_not_depend_on_its_row_or_its_neighbours() -> None:
    """With tiles of one shape: nothing is added in the order of arrival."""
    dtype, index = torch.bfloat16, ROUTINGS["uneven"]
    experts, x, weights = mxfp4_experts(dtype), tokens(len(index), dtype), routing_weights(index, dtype)
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(3))
    out = by_kernels(x, experts, index, weights)
    assert torch.equal(by_kernels(x[order], experts, index[order], weights[order]), out[order])
    assert torch.equal(by_kernels(x[:9], experts, index[:9], weights[:9]), out[:9])


def test_no_tokens_launch_nothing() -> None:
    index = torch.zeros(0, 2, dtype=torch.int64)
    assert by_kernels(tokens(0, torch.bfloat16), mxfp4_experts(torch.bfloat16), index, index).shape == (0, HIDDEN)


def test_launches_depend_on_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read on the host: tensors of the meta device have no data."""
    launches = Launches(monkeypatch)
    for index in (ROUTINGS["one token"], ROUTINGS["many tokens"]):
        x, weights, *_ = (to_meta(tensor) for tensor in (tokens(len(index), torch.bfloat16), index.bfloat16()))
        experts = to_meta(mxfp4_experts(torch.bfloat16))
        with launches:
            GpuExperts().experts(x, experts, to_meta(index), weights)
    assert launches.names == ["sort_kernel", "product_kernel", "product_kernel", "combine_kernel"] * 2


@pytest.mark.parametrize(
    ("experts", "dtype", "why"),
    [
        (mxfp4_experts(torch.bfloat16), torch.float32, "MXFP4 with dtype float32"),
        (mxfp4_experts(torch.bfloat16), torch.float64, "dtype float64"),
        (
            ExpertProducts(plain_weights(2, 64, 32, torch.float16), plain_weights(2, 32, 32, torch.float16), SwiGlu()),
            torch.bfloat16,
            "weights in float16",
        ),
    ],
)
def test_what_is_unsupported_is_named(experts: ExpertProducts, dtype: torch.dtype, why: str) -> None:
    assert why in (GpuExperts().unsupported(experts, dtype) or "")
