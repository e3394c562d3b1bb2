"""Where the time of Inflight's steps goes, for decoders that run as one native call.

A first pass over the requests times the call. In a second pass, each step's products and attention run once more,
separately, right after the call, with its shapes and KV pool; their share of the time there is taken as their share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inflight.attention.base import current_batch
from inflight.kernels.cpu.cpu_linear import PackedWeight, linear

if TYPE_CHECKING:
    from inflight.loading.forward.native_decoder import NativeDecoder


class TimedDecoder:
    """Replaces the decoder, and times it.

    Attributes:
        seconds: total of all calls.
        pieces: seconds of the calls' products and attention, run separately; only with `takes_apart`.
    """

    def __init__(self, decoder: NativeDecoder) -> None:
        self.decoder = decoder
        self.takes_apart = False
        self.reset()

    def reset(self) -> None:
        self.seconds = 0.0
        self.pieces = {"linear": 0.0, "attention": 0.0}

    def run(self, input_ids: Tensor, position_ids: Tensor, keep: Tensor, asked: Tensor, hidden: Tensor) -> Any:
        """See `ForwardPass`."""
        start = time.perf_counter()
        result = self.decoder.run(input_ids, position_ids, keep, asked, hidden)
        self.seconds += time.perf_counter() - start
        if self.takes_apart:
            tokens, num_logits = input_ids.shape[1], len(keep) + len(asked)
            self.pieces["linear"] += _seconds(lambda: self._multiply(tokens, num_logits))
            self.pieces["attention"] += _seconds(lambda: self._attend(tokens))
        return result

    def _multiply(self, tokens: int, num_logits: int) -> None:
        """All products of a step; after the last attention, only the tokens with logits continue."""
        layers = self.decoder.tables.layers
        for index, layer in enumerate(layers):
            self._linear(layer.qkv, tokens)
            rows = num_logits if index == len(layers) - 1 else tokens
            for weight in (layer.output, layer.gate_up, layer.down):
                self._linear(weight, rows)
        self._linear(self.decoder.tables.head, num_logits)

    def _linear(self, weight: PackedWeight, rows: int) -> None:
        if rows:
            linear(torch.zeros(rows, weight.in_features, dtype=self.decoder.dtype), weight)

    def _attend(self, tokens: int) -> None:
        for attention in self.decoder.attention:
            spec = attention.spec
            query = torch.zeros(tokens, spec.num_heads, spec.key_head_size, dtype=self.decoder.dtype)
            attention.backend.attend(query, attention.cache, current_batch(), spec, None)


def _seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def break_down(runner: Any, work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Seconds of the steps by kind of work; `work` runs them once and returns the seconds of their phases
    (schedule, forward, sample, update).

    Raises:
        RuntimeError: the steps did not call the decoder.
    """
    runner = getattr(runner, "runner", runner)  # within a runner with a thread of its own
    if not hasattr(runner.model, "tables"):
        return work()
    timed = runner.forward = TimedDecoder(runner.model)
    try:
        parts = work()
        seconds = timed.seconds
        timed.reset()
        timed.takes_apart = True
        work()
    finally:
        runner.forward = runner.model
    if not timed.seconds or not seconds:
        raise RuntimeError(f"the steps of {type(runner).__name__} do not call its decoder where it was replaced")
    shares = {name: piece / timed.seconds for name, piece in timed.pieces.items()}
    scale = 1.0 / max(1.0, sum(shares.values()))  # separately they may take longer than together
    kinds = {name: share * scale * seconds for name, share in shares.items()}
    kinds["norm, rotary, residual, barriers"] = max(0.0, seconds - sum(kinds.values()))
    kinds["Python around the forward pass"] = max(0.0, parts.pop("forward") - seconds)
    return {**kinds, **parts}
