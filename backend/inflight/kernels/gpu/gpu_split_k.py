"""A linear layer for a few rows: its inputs are split among programs, so that a layer with few outputs fills the card.

With at most 16 rows a product reads its weights once and computes almost nothing: it is as fast as the memory if
enough bytes are in flight.  A layer with 4,096 outputs has 128 tiles of them, a program each; an H100 could run four
times as many.  So each tile's inputs are split into parts, and a program multiplies one part:

    tile 0    part 0   part 1   part 2   part 3      each stores float32 sums [16, BLOCK_N] in the workspace, and the
    tile 1    part 0   part 1   part 2   part 3      one that arrives last adds them up, in the order of parts

The counter of arrivals is an integer and the order of additions is fixed: bits do not depend on timing.  Tiles and
parts follow from the layer's size and the card, and no row of a product depends on another: up to 16 rows, a row's bits
are the same in any batch.

Osama et al., Stream-K, arXiv:2301.03598, section 3 ("fixed-split"), with the last arrival in place of a second launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.gpu.gpu_pdl import begin, pdl_options
from inflight.kernels.gpu.launch import interpreted

__all__ = ["MAX_ROWS", "Split", "Workspace", "num_sms_of", "split_k_linear", "split_of"]

MAX_ROWS = 16  # of the smallest tensor-core product

_BLOCK_N, _BLOCK_K = 32, 128
# Programs that an SM runs at once and that together keep 64 KiB in flight: each has three tiles of 8 KiB.
_PROGRAMS_PER_SM = 4
_MIN_STEPS = 4  # tiles of a part: fewer do not fill the pipeline
_WARPS, _STAGES = 4, 4
_INTERPRETED_SMS = 4  # programs that do nothing take the interpreter time, too


@dataclass(frozen=True)
class Split:
    """How a layer's product is shared.

    Attributes:
        tiles: of outputs.
        parts: of the inputs; at least two.
        steps: tiles of inputs in a part.
    """

    tiles: int
    parts: int
    steps: int


def num_sms_of(device: torch.device) -> int:
    """SMs of a card; those of a small one for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED_SMS


def split_of(out_features: int, in_features: int, num_sms: int) -> Split | None:
    """The split that fills a card of `num_sms`; None if the layer's outputs alone do, or its inputs are few."""
    tiles, total = triton.cdiv(out_features, _BLOCK_N), triton.cdiv(in_features, _BLOCK_K)
    wanted = min(triton.cdiv(_PROGRAMS_PER_SM * num_sms, tiles), total // _MIN_STEPS)
    if wanted < 2:
        return None
    steps = triton.cdiv(total, wanted)
    return Split(tiles, triton.cdiv(total, steps), steps)


class Workspace:
    """Scratch memory that the products of a model share: they run one after the other.

    Attributes:
        sums: float32 [numel], of the parts of a product; undefined between products.
        arrived: int32 [tiles], parts of each tile that are done; zero between products.
    """

    def __init__(self, layers: list[tuple[Split, int]], device: torch.device) -> None:
        """`layers`: split and outputs of each layer that will use it."""
        numel = max(split.parts * MAX_ROWS * out_features for split, out_features in layers)
        self.sums = torch.empty(numel, dtype=torch.float32, device=device)
        tiles = max(split.tiles for split, _ in layers)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_rows"])
def split_k_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    arrived_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """One part of one tile, and the tile's result if all other parts are done.  Grid (tiles, PARTS).

    x [num_rows <= BLOCK_M, K], weight [N, K], bias [N] or None, out [num_rows, N], all contiguous.
    """
    begin(PDL)
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    present, exists = rows < num_rows, outputs < N
    weights = weight_ptr + outputs.to(tl.int64)[:, None] * K
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = part * STEPS
    for step in range(first, tl.minimum(first + STEPS, (K + BLOCK_K - 1) // BLOCK_K)):
        inputs = step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (inputs < K)[None, :]
        weight = tl.load(weights + inputs[None, :], mask=exists[:, None] & inside, other=0.0)
        x = tl.load(x_ptr + rows[:, None] * K + inputs[None, :], mask=present[:, None] & inside, other=0.0)
        sums = tl.dot(x.to(DOT), weight.to(DOT).T, sums, input_precision="ieee")

    inside = present[:, None] & exists[None, :]
    places = sums_ptr + rows[:, None] * N + outputs[None, :]
    tl.store(places + part * (BLOCK_M * N), sums, mask=inside)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for done in range(PARTS):
            # Not from L1, which may have lines of an earlier product.
            total += tl.load(places + done * (BLOCK_M * N), mask=inside, other=0.0, cache_modifier=".cg")
        if bias_ptr is not None:
            total += tl.load(bias_ptr + outputs, mask=exists, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + rows[:, None] * N + outputs[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(arrived_ptr + tile, 0)


def split_k_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, split: Split, workspace: Workspace, launch_pdl: bool = False
) -> Tensor:
    """x [M, K], 1 <= M <= MAX_ROWS, times the transpose of weight [N, K], plus bias [N]: [M, N], all in one dtype.

    Sums are in float32 and rounded once.  Launches one kernel, compiled once for all M, and allocates only the result.
    """
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    dot = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[weight.dtype]
    if weight.dtype == torch.bfloat16 and interpreted():
        dot = tl.float32  # the interpreter multiplies the bit patterns of bfloat16
    split_k_kernel[(split.tiles, split.parts)](
        x.contiguous(),
        weight,
        bias,
        out,
        workspace.sums,
        workspace.arrived,
        num_rows,
        N=out_features,
        K=in_features,
        PARTS=split.parts,
        STEPS=split.steps,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        DOT=dot,
        num_warps=_WARPS,
        num_stages=_STAGES,
        **pdl_options(launch_pdl),
    )
    return out
