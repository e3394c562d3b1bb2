"""A mixture's experts, and layers in fp8 with a scale per block: correctness and speed.  Used by bench/gpu_ops.py.

Steps of few tokens are limited by the bytes of the weights that they read; of a mixture, the chosen experts' weights.
They are compared with the rate at which the card reads, and with torch's products of plain weights in bfloat16 alone:
`grouped_mm` without sort, gate and sum, and `linear`.  Times are medians of graph replays over enough routings, or
copies of the weights, that none remains in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_rates import FLUSH_BYTES, read_rate, seconds
from torch import Tensor

from inflight.kernels.gpu.gpu_block_fp8 import GpuBlockFp8
from inflight.kernels.gpu.gpu_experts import GpuExperts
from inflight.ops.block_fp8 import BLOCK_INPUTS
from inflight.ops.experts import MX_BLOCK, ExpertProducts, ExpertWeights, SwiGlu, reference_experts

_ROUTINGS = 16  # of one token, they choose most of a layer's experts
ERROR_LIMIT = 0.01  # relative, of 16 bits
# name -> experts, hidden size, inner size, experts of a token, and whether they are in MXFP4
MIXTURES = {"gpt-oss 20B": (32, 2880, 2880, 4, True), "Qwen3 30B-A3B": (128, 2048, 768, 8, False)}
TINY = {"gpt-oss": (4, 64, 32, 2, True), "Qwen3": (4, 64, 32, 2, False)}


def _weights(experts: int, outputs: int, inputs: int, packed: bool, like: Tensor) -> ExpertWeights:
    device = like.device
    if not packed:
        return ExpertWeights((torch.randn(experts, outputs, inputs, device=device) / inputs**0.5).to(like.dtype))
    values = torch.randint(0, 256, (experts, outputs, inputs // 2), device=device, dtype=torch.uint8)
    scales = torch.randint(118, 122, (experts, outputs, inputs // MX_BLOCK), device=device, dtype=torch.uint8)
    return ExpertWeights(values, scales, torch.zeros(experts, outputs, device=device, dtype=like.dtype))


def _products(mixture: tuple[int, int, int, int, bool], like: Tensor) -> ExpertProducts:
    experts, hidden, inner, _, packed = mixture
    gate_up = _weights(experts, 2 * inner, hidden, packed, like)
    gate = SwiGlu(interleaved=True, limit=7.0, alpha=1.702) if packed else SwiGlu()
    return ExpertProducts(gate_up, _weights(experts, hidden, inner, packed, like), gate)


def _routing(tokens: int, mixture: tuple[int, int, int, int, bool], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, and experts drawn at random with their weights."""
    experts, hidden, _, choices, _ = mixture
    index = torch.rand(tokens, experts, device=like.device).topk(choices).indices
    x = torch.randn(tokens, hidden, device=like.device).to(like.dtype)
    return x, index, torch.full((tokens, choices), 1 / choices, device=like.device, dtype=like.dtype)


def _bytes_of(weights: ExpertWeights) -> int:
    """Of one expert's layer."""
    return sum(part[0].nbytes for part in (weights.values, weights.scales) if part is not None)


def check_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Relative errors, compared with the definition in float32."""
    # The interpreter multiplies the bits of bfloat16.
    like = torch.empty(0, device=device, dtype=torch.float16 if device.type == "cpu" else torch.bfloat16)
    for name, mixture in (TINY if device.type == "cpu" else MIXTURES).items():
        products = _products(mixture, like)
        for tokens in (2,) if device.type == "cpu" else (1, 33, 2048):
            x, index, weights = _routing(tokens, mixture, like)
            exact = reference_experts(x.float(), products, index, weights.float())
            error = _relative(GpuExperts().experts(x, products, index, weights), exact)
            yield _error_row("experts are right", f"{name}, {tokens} tokens", error)
    outputs, inputs = (64, 128) if device.type == "cpu" else (4096, 14336)
    weight, scale = _blocks(outputs, inputs, device)
    for rows in (2,) if device.type == "cpu" else (1, 17, 256):
        x = torch.randn(rows, inputs, device=device).to(like.dtype)
        wide = scale.repeat_interleave(BLOCK_INPUTS, 0)[:outputs].repeat_interleave(BLOCK_INPUTS, 1)
        exact = F.linear(x.float(), weight.float() * wide)
        got = GpuBlockFp8().linear(x, weight, scale, (BLOCK_INPUTS, BLOCK_INPUTS), None)
        yield _error_row("block-scaled fp8 is right", f"{rows} x {inputs} -> {outputs}", _relative(got, exact))


def _relative(got: Tensor, exact: Tensor) -> float:
    return ((got.float() - exact).norm() / exact.norm()).item()


def _error_row(name: str, shape: str, error: float) -> dict[str, Any]:
    return dict(name=name, shape=shape, achieved=error, limit=ERROR_LIMIT, ratio=error / ERROR_LIMIT,
                unit="relative error", passed=error <= ERROR_LIMIT)  # fmt: skip


def expert_rows(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows {name, shape, microseconds, achieved, limit, ratio, unit, over_torch}; `over_torch` is the speedup."""
    like, rate = torch.empty(0, device=device, dtype=torch.bfloat16), read_rate(device)
    for name, mixture in (TINY if device.type == "cpu" else MIXTURES).items():
        products, plain = _products(mixture, like), _products((*mixture[:4], False), like)
        for tokens in (2,) if device.type == "cpu" else (1, 64) if quick else (1, 16, 64, 256, 2048):
            drawn = [_routing(tokens, mixture, like) for _ in range(_ROUTINGS if device.type == "cuda" else 1)]
            of_one = _bytes_of(products.gate_up) + _bytes_of(products.down)
            moved = of_one * sum(len(index.unique()) for _, index, _ in drawn) / len(drawn)
            calls = [partial(GpuExperts().experts, x, products, index, weights) for x, index, weights in drawn]
            ours = seconds(calls, device)
            by_torch = seconds([_grouped(x, plain, index) for x, index, _ in drawn], device)
            yield dict(name="experts", shape=f"{name}, {tokens} tokens", microseconds=ours * 1e6,
                       achieved=moved / ours, limit=rate, ratio=moved / ours / rate, unit="bytes/s",
                       over_torch=by_torch / ours)  # fmt: skip


def _grouped(x: Tensor, experts: ExpertProducts, index: Tensor) -> Callable[[], Tensor]:
    """The two products by torch alone, of rows in any order: their times depend on how many rows an expert has."""
    ends = torch.bincount(index.flatten(), minlength=experts.num_experts).cumsum(0).int()
    rows = x.repeat_interleave(index.shape[1], 0)
    inner = rows.new_zeros(len(rows), experts.down.num_inputs)

    def products() -> Tensor:
        F.grouped_mm(rows, experts.gate_up.values.transpose(1, 2), offs=ends)
        return F.grouped_mm(inner, experts.down.values.transpose(1, 2), offs=ends)

    return products


def _blocks(outputs: int, inputs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A weight in e4m3, and a scale for each 128 x 128 of it."""
    weight = torch.randn(outputs, inputs, device=device).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return weight, torch.rand(-(-outputs // BLOCK_INPUTS), -(-inputs // BLOCK_INPUTS), device=device) / 1000


def block_fp8_rows(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows as `expert_rows`, of linear layers of Qwen3 8B."""
    if device.type == "cpu":
        sizes, batches = [(64, 128)], [2]
    else:
        sizes, batches = [(24576, 4096), (4096, 12288)], [1, 64] if quick else [1, 16, 64, 256]
    rate, block = read_rate(device), (BLOCK_INPUTS, BLOCK_INPUTS)
    for outputs, inputs in sizes:
        copies = 1 if device.type == "cpu" else max(2, FLUSH_BYTES // (outputs * inputs))
        weights = [_blocks(outputs, inputs, device) for _ in range(copies)]
        plain = [weight.bfloat16() for weight, _ in weights]
        for rows in batches:
            x = torch.randn(rows, inputs, device=device).bfloat16()
            ours = seconds([partial(GpuBlockFp8().linear, x, *weight, block, None) for weight in weights], device)
            by_torch = seconds([partial(F.linear, x, weight) for weight in plain], device)
            moved = outputs * inputs
            yield dict(name="block-scaled fp8", shape=f"{rows} x {inputs} -> {outputs}", microseconds=ours * 1e6,
                       achieved=moved / ours, limit=rate, ratio=moved / ours / rate, unit="bytes/s",
                       over_torch=by_torch / ours)  # fmt: skip
