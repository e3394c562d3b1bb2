"""An emulated card for each test, and what programs do on it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from card_rig import card
from torch import Tensor

__all__ = ["CUDA", "card", "double_kernel", "on_card"]

CUDA = torch.device("cuda")


@triton.jit
def double_kernel(source, target, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, 2 * tl.load(source + offsets, mask=offsets < count), mask=offsets < count)


def on_card(*values: float) -> Tensor:
    return torch.tensor(values, device=CUDA)
