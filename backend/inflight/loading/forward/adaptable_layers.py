"""The linear layers of a transformers model that can have an adapter.

These are the ones that a trial shows to be called with all tokens: not an expert, which gets the tokens that are routed
to it, not a layer whose weight the model reads by itself, and not the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from inflight.loading.forward.last_logits import KeepsLogits
from inflight.loading.forward.packed_linear import PackedLinear
from inflight.loading.quantization.block_fp8_linear import BlockFp8Linear
from inflight.loading.quantization.coded_linear import CodedLinear
from inflight.loading.quantization.int4_linear import Int4Linear

__all__ = ["called_with_all", "linears_of", "module_of", "sizes_of"]

_LINEAR = (nn.Linear, PackedLinear, CodedLinear, Int4Linear, BlockFp8Linear, Conv1D)


def module_of(model: Any) -> Any:
    """transformers' module in what a loader returned."""
    return model.model if isinstance(model, KeepsLogits) else model


def linears_of(module: Any) -> dict[str, nn.Module]:
    """All linear layers but the head, by their paths."""
    head = module.get_output_embeddings()
    return {path: layer for path, layer in module.named_modules() if layer is not head and isinstance(layer, _LINEAR)}


def called_with_all(layers: Mapping[str, nn.Module], trial: Callable[[], int]) -> list[str]:
    """The layers that every call of the trial gives all tokens, by position."""
    rows: dict[str, set[int]] = {}

    def noted(path: str) -> Callable[..., None]:
        def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows.setdefault(path, set()).add(inputs[0].numel() // inputs[0].shape[-1] if inputs else 0)

        return note

    handles = [layer.register_forward_pre_hook(noted(path)) for path, layer in layers.items()]
    num_tokens = trial()
    for handle in handles:
        handle.remove()
    return [path for path in layers if rows.get(path) == {num_tokens}]


def sizes_of(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)
