"""The least time that a machine needs for a schedule, from counted bytes and FLOPs and measured rates.

A step computes T tokens and samples R. With P parameters in the layers' matrices, H in the output head, b bytes per
weight, and rates B (bytes/s read) and G (FLOP/s of square matrix products), it takes at least

    max(P b / B, 2 P T / G)  +  max(H b / B, 2 H R / G)  +  max(KV bytes / B, attention FLOPs / G)

The three run one after another, hence a maximum for each. KV bytes: every sequence of the step reads the keys and
values of its context once per layer. Attention FLOPs: 4 x query heads x head size per layer for each query and each
key that it attends to. Norms, rotary embedding, sampling and everything that is not arithmetic are free.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Bytes per element; the scale that u8 stores with each head is not counted.
BYTES = {"bf16": 2, "fp32": 4, "u8": 1}

# One step, per sequence: new tokens, tokens computed before, whether it samples.
Step = tuple[Sequence[int], Sequence[int], Sequence[bool]]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense decoder with gated MLP (llama, Qwen3) that determine its time."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> ModelShape:
        return cls.of(SimpleNamespace(**json.loads((Path(folder) / "config.json").read_text())))

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Of a configuration of transformers."""
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.vocab_size,
        )

    @property
    def layer_parameters(self) -> int:
        """P: the matrices of all layers, read once a step."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """H: the output head."""
        return self.hidden * self.vocab

    def kv_elements(self, tokens: int) -> int:
        """Elements of the keys and values of `tokens` tokens in all layers."""
        return tokens * 2 * self.layers * self.kv_heads * self.head_size

    def attention_flops(self, pairs: int) -> int:
        """FLOPs of `pairs` query-key pairs in all layers and heads."""
        return pairs * 4 * self.layers * self.heads * self.head_size


@dataclass(frozen=True)
class Rates:
    """The machine's best rates: bytes/s of reading memory, FLOP/s of matrix products."""

    read: float
    multiply: float


def step_seconds(shape: ModelShape, step: Step, weight_bytes: int, kv_bytes: int, rates: Rates) -> float:
    """The formula above for one step."""
    counts, computed, samples = step
    contexts = [before + count for count, before in zip(counts, computed)]
    pairs = sum(count * before + count * (count + 1) // 2 for count, before in zip(counts, computed))
    work = [
        (shape.layer_parameters * weight_bytes, 2 * shape.layer_parameters * sum(counts)),
        (shape.head_parameters * weight_bytes * any(samples), 2 * shape.head_parameters * sum(samples)),
        (shape.kv_elements(sum(contexts)) * kv_bytes, shape.attention_flops(pairs)),
    ]
    return sum(max(size / rates.read, flops / rates.multiply) for size, flops in work)


def floor_seconds(shape: ModelShape, steps: Iterable[Step], weights: str, kv: str, rates: Rates) -> float:
    """Sum over the steps, for the precisions named in BYTES."""
    return sum(step_seconds(shape, step, BYTES[weights], BYTES[kv], rates) for step in steps)


def measure(weights: str, threads: int, seconds: float = 1.5, size: int = 2048) -> Rates:
    """Best of the calls that fit in `seconds` each: torch's sum over 512 MiB, and square products, by torch's matmul
    and, where oneDNN supports the dtype on this CPU, with the right side packed by it."""
    import torch

    torch.set_num_threads(threads)
    memory = torch.ones(2**27)
    read = memory.numel() * 4 / _best(memory.sum, seconds)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[weights]
    left, right = torch.randn(2, size, size).to(dtype).unbind()
    products: list[Callable[[], Any]] = [lambda: left @ right]
    if torch.backends.mkldnn.is_available() and (weights == "fp32" or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        packed = torch.ops.mkldnn._reorder_linear_weight(right, size)
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""))
    with torch.inference_mode():
        multiply = max(2 * size**3 / _best(product, seconds) for product in products)
    return Rates(read, multiply)


def _best(function: Callable[[], Any], seconds: float) -> float:
    function()
    shortest, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        function()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
