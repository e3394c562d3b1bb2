"""Logits of some tokens, by a model that always computes those of all."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor, nn

__all__ = ["KeepsLogits"]


class KeepsLogits:
    """Called like `model`, whose forward ignores `logits_to_keep`; such a head cannot run for a part of the tokens."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor | int = 0, use_cache: bool = False
    ) -> SimpleNamespace:
        """input_ids, position_ids int64 [1, T]; logits [1, K, V] of the last K tokens (0: all) or of int64 [K]."""
        logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache).logits
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=logits[:, kept])
