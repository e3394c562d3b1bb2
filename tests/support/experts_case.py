"""Random experts and routings."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.ops.experts import MX_BLOCK, ExpertWeights

__all__ = ["mxfp4_weights", "plain_weights", "routings"]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain_weights(experts: int, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> ExpertWeights:
    """Without bias, scaled so that outputs are as large as inputs."""
    values = torch.randn(experts, outputs, inputs, generator=_generator(seed)) / inputs**0.5
    return ExpertWeights(values.to(dtype))


def mxfp4_weights(experts: int, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> ExpertWeights:
    """Every code, scales of six sizes, and a bias."""
    generator = _generator(seed)
    values = torch.randint(0, 256, (experts, outputs, inputs // 2), generator=generator).to(torch.uint8)
    scales = torch.randint(119, 125, (experts, outputs, inputs // MX_BLOCK), generator=generator).to(torch.uint8)
    return ExpertWeights(values, scales, torch.randn(experts, outputs, generator=generator).to(dtype))


def routings(num_experts: int, num_choices: int) -> dict[str, Tensor]:
    """int64 [T, num_choices] by name; a token's experts differ."""
    generator = _generator(7)
    uniform = torch.stack([torch.randperm(num_experts, generator=generator)[:num_choices] for _ in range(70)])
    one = torch.arange(num_choices).expand(35, -1)
    return {
        "one token": uniform[:1],
        "few tokens, experts without any": uniform[:2],
        "all tokens to the same experts": one,
        "uneven": torch.cat([one, uniform[:9], one.flip(1)]),
        "many tokens": uniform,
    }
