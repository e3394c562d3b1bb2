"""Random matrices of adapters in slots, and what they add in float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from inflight.ops.lora import LoraSlots

__all__ = ["exact_sums", "lora_slots"]


def lora_slots(
    count: int,
    num_inputs: int,
    sizes: tuple[int, ...],
    rank: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> LoraSlots:
    """`count` slots in one tensor, each with more than these two products' matrices: surrounded by NaN."""
    generator, width = torch.Generator().manual_seed(0), len(sizes) * rank
    a = torch.randn(count, width, num_inputs, generator=generator) * num_inputs**-0.5
    b = torch.randn(count, sum(sizes), rank, generator=generator) * rank**-0.5
    whole = torch.full((count, 16 + a[0].numel() + 16 + b[0].numel() + 16), torch.nan, dtype=dtype)
    places = [(16, a), (32 + a[0].numel(), b)]
    whole = whole.to(device)
    views = [whole[:, start : start + part[0].numel()].view(part.shape) for start, part in places]
    for view, part in zip(views, (a, b)):
        view.copy_(part)
    return LoraSlots(views[0], views[1], sizes)


def exact_sums(x: Tensor, slots: LoraSlots, slot_of_token: Tensor, y: Tensor) -> Tensor:
    """y [T, N] with what the slots add to it, in float64."""
    rank, starts, result = slots.rank, slots.starts, y.cpu().double()
    for token, slot in enumerate(slot_of_token.tolist()):
        if slot < 0:
            continue
        inner = slots.a[slot].cpu().double() @ x[token].cpu().double()
        for part, (start, end) in enumerate(pairwise(starts)):
            own = inner[part * rank : (part + 1) * rank]
            result[token, start:end] += slots.b[slot, start:end].cpu().double() @ own
    return result
