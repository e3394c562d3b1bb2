"""Weights in four bits of every kind that the kernel takes, and the computations of a card by their twin on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from inflight.loading.quantization import int4_linear, schemes
from inflight.ops.int4 import Int4Weight, span_of, tiled

__all__ = ["KINDS", "int4_twins", "int4_weight"]

KINDS = ("symmetric", "zeros", "mins")


def int4_weight(
    outputs: int, inputs: int, group: int, kind: str, scales: torch.dtype = torch.float16, seed: int = 0
) -> tuple[Int4Weight, torch.Tensor]:
    """A random weight on the CPU, and its numbers in float64, computed from codes that were never in tiles."""
    generator = torch.Generator().manual_seed(seed)

    def integers(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, dtype=torch.uint8, generator=generator)

    def wide(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.double().t().repeat_interleave(group, 1)

    codes, count = integers(16, outputs, inputs), inputs // group
    codes[0, 0], codes[-1, -1] = 0, 15
    span = span_of(inputs, group)
    assert span is not None
    if kind == "mins":
        factors = torch.rand(2, outputs, generator=generator) * torch.tensor([[1e-3], [5e-3]])
        weight = Int4Weight(tiled(codes, span), integers(256, count, outputs), integers(256, count, outputs), factors)
        assert weight.offsets is not None
        d, d_min = factors.double()[:, :, None]
        return weight, codes.double() * wide(weight.scales) * d - wide(weight.offsets) * d_min
    zeros = integers(16, count, outputs) if kind == "zeros" else None
    weight = Int4Weight(tiled(codes, span), (torch.randn(count, outputs, generator=generator) / 50).to(scales), zeros)
    return weight, (codes.double() - (8 if zeros is None else wide(zeros))) * wide(weight.scales)


@contextmanager
def int4_twins() -> Iterator[None]:
    """Weights in four bits load and run on this CPU as they do on a GPU."""
    with patch.object(schemes, "_WITH_HEAD_BITS", ()), patch.object(int4_linear, "unsupported", return_value=None):
        yield
