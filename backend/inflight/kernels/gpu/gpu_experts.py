"""`ExpertOps` in the Triton language: four launches a layer, the same ones for any routing.

    sort pairs by expert | x @ gate_up, gate | @ down | weighted sum

The sums of a token are added in the order of its choices, without atomics: equal inputs give equal bits.  As in
cuBLAS, a step's size decides the shape of tiles, and with it the last bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.gpu.gpu_experts_kernels import combine_kernel, product_kernel, sort_kernel
from inflight.kernels.gpu.launch import interpreted
from inflight.ops.experts import MX_BLOCK, ExpertProducts, ExpertWeights

__all__ = ["GpuExperts"]

_SORT_BLOCK = 1024
_COMBINE_BLOCK = 1024
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_MAX_EXPERTS = 1024  # each program reads all their ends


class _Tile(NamedTuple):
    """Rows, outputs and inputs of a step of a product's loop; warps and stages of its program."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# A step takes the largest tile that an expert's mean share of its pairs would fill.
_TILES = (_Tile(16, 128, 128, 4, 3), _Tile(64, 128, 64, 8, 3), _Tile(128, 128, 64, 8, 3))
_TILES_FLOAT32 = (_Tile(16, 32, 32, 4, 2),)


class GpuExperts:
    """`ExpertOps` on a GPU; with the Triton language's interpreter, on any tensors."""

    name = "gpu"

    def unsupported(self, experts: ExpertProducts, dtype: torch.dtype) -> str | None:
        """See `ExpertOps.unsupported`."""
        if dtype not in _DTYPES:
            return f"dtype {str(dtype).removeprefix('torch.')}"
        if experts.num_experts > _MAX_EXPERTS:
            return f"{experts.num_experts} experts (supported: up to {_MAX_EXPERTS})"
        for weights in (experts.gate_up, experts.down):
            if weights.scales is not None and dtype == torch.float32:
                return "MXFP4 with dtype float32 (supported: bfloat16, float16)"
            if weights.scales is not None and weights.num_inputs % MX_BLOCK:
                return f"MXFP4 with {weights.num_inputs} inputs (supported: multiples of {MX_BLOCK})"
            if weights.scales is None and weights.values.dtype != dtype:
                return f"weights in {str(weights.values.dtype).removeprefix('torch.')} for tokens in another dtype"
        return None

    def prepare(self, experts: ExpertProducts, dtype: torch.dtype) -> None:
        """See `ExpertOps.prepare`."""
        device = experts.gate_up.values.device
        x = torch.zeros(1, experts.gate_up.num_inputs, dtype=dtype, device=device)
        index = torch.zeros(1, 1, dtype=torch.int64, device=device)
        for tile in _tiles(dtype):
            _experts(x, experts, index, index.to(dtype), tile)

    def experts(self, x: Tensor, experts: ExpertProducts, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `ExpertOps.experts`."""
        share = top_k_index.numel() // experts.num_experts
        filled = [tile for tile in _tiles(x.dtype) if tile.rows <= share]
        return _experts(x, experts, top_k_index, top_k_weights, filled[-1] if filled else _tiles(x.dtype)[0])


def _tiles(dtype: torch.dtype) -> tuple[_Tile, ...]:
    return _TILES_FLOAT32 if dtype == torch.float32 else _TILES


def _experts(x: Tensor, experts: ExpertProducts, index: Tensor, weights: Tensor, tile: _Tile) -> Tensor:
    (num_tokens, num_choices), width = index.shape, experts.down.num_outputs
    if not num_tokens:
        return x.new_empty(0, width)
    index, weights = index.contiguous(), weights.contiguous()
    num_pairs, num_experts = index.numel(), experts.num_experts
    order = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    sort_kernel[(num_experts,)](index, order, ends, num_pairs, BLOCK=_SORT_BLOCK, num_warps=4)
    inner = x.new_empty(num_pairs, experts.down.num_inputs)
    _product(x, order, ends, experts, experts.gate_up, inner, num_choices, tile)
    results = x.new_empty(num_pairs, width)
    _product(inner, order, ends, experts, experts.down, results, num_choices, tile)
    out = x.new_empty(num_tokens, width)
    block = min(_COMBINE_BLOCK, triton.next_power_of_2(width))
    combine_kernel[(num_tokens, triton.cdiv(width, block))](
        results, index, weights, out, num_choices,
        NUM_EXPERTS=num_experts, WIDTH=width, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _product(
    x: Tensor,
    order: Tensor,
    ends: Tensor,
    experts: ExpertProducts,
    weights: ExpertWeights,
    out: Tensor,
    num_choices: int,
    tile: _Tile,
) -> None:
    """Launch one of the two products for all pairs."""
    num_experts, num_pairs, gate = experts.num_experts, len(order), experts.gate
    # Each expert with pairs has at most one tile that is not full.
    num_tiles = min(num_pairs, (num_pairs + num_experts * (tile.rows - 1)) // tile.rows)
    values = weights.values if weights.scales is None else weights.values.view(torch.int32)
    assert x.stride(1) == 1
    product_kernel[(num_tiles, triton.cdiv(weights.num_outputs, tile.outputs))](
        x, order, ends, values, weights.scales, weights.bias, out,
        num_choices, x.stride(0), *values.stride(), 0.0 if gate.limit is None else gate.limit, gate.alpha,
        NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts),
        NUM_INPUTS=weights.num_inputs, NUM_OUTPUTS=weights.num_outputs,
        IS_FIRST=weights is experts.gate_up, INTERLEAVED=gate.interleaved, CLAMPED=gate.limit is not None,
        BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs, DOT=_operands(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _operands(dtype: torch.dtype) -> tl.dtype:
    """The type that a product multiplies."""
    if dtype == torch.bfloat16 and interpreted():
        return tl.float32  # the interpreter multiplies the bit patterns of bfloat16
    return _DTYPES[dtype]
