"""The matrix products of a step alone, in one CUDA graph: what a step takes if all else is free."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from cpu_floor import ModelShape
from gpu_rates import seconds
from torch import Tensor

__all__ = ["gemm_seconds", "layer_sizes"]


def layer_sizes(config: Any) -> list[tuple[int, int]]:
    """(outputs, inputs) of the products of a layer as the engine computes them: query, key and value in one, gate and
    up in one."""
    shape = ModelShape.of(config)
    heads, kv_heads = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    return [
        (heads + 2 * kv_heads, shape.hidden),
        (shape.hidden, heads),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    ]


@torch.no_grad()
def gemm_seconds(
    config: Any, dtype: torch.dtype, device: torch.device, batches: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Seconds of a step's products for each of `batches`, which are (tokens, rows with logits).

    Weights have the model's shapes and number, one per layer, so none is left in the L2 cache from the step before.
    All memory is free afterwards.  On a CPU the products run once, without a graph.
    """
    sizes = layer_sizes(config) * config.num_hidden_layers
    weights = [_random(outputs, inputs, dtype, device) for outputs, inputs in sizes]
    head = _random(config.vocab_size, config.hidden_size, dtype, device)
    return {
        (tokens, rows): seconds([partial(_multiply, _products(weights, tokens) + _products([head], rows))], device)
        for tokens, rows in batches
    }


def _random(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight of random numbers: a card multiplies zeros faster, because they cost less power."""
    return torch.empty(outputs, inputs, dtype=dtype, device=device).normal_(0, inputs**-0.5)


def _products(weights: list[Tensor], rows: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(x, weight, out) for each weight; layers share x and out, as they share a step's buffers."""
    outs = {weight.shape[0]: weight.new_empty(rows, weight.shape[0]) for weight in weights}
    xs = {weight.shape[1]: weight.new_empty(rows, weight.shape[1]).normal_() for weight in weights}
    return [(xs[weight.shape[1]], weight, outs[weight.shape[0]]) for weight in weights]


def _multiply(products: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    for x, weight, out in products:
        torch.mm(x, weight.t(), out=out)
