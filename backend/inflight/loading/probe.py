"""The probe forward pass: what each layer's attention requires."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inflight.attention.base import LayerSpec
from inflight.attention.hf import UnsupportedAttention, probe_layers
from inflight.loading.errors import LoadError

__all__ = ["probe"]


@torch.inference_mode()
def probe(
    model: nn.Module, text_config: Any, max_model_len: int, device: torch.device
) -> list[tuple[nn.Module, LayerSpec]]:
    """Run two tokens through the model and record each layer's attention: (module, spec) in order.

    Raises:
        LoadError: the architecture is not supported, by name.
    """
    kind = text_config.model_type
    token_ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    with probe_layers() as layers:
        try:
            model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=1)
        except UnsupportedAttention as error:
            raise LoadError(f"model type {kind!r} is not supported: {error}") from error
        except (TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise LoadError(f"model type {kind!r} cannot run a ragged batch: {error}") from error
    expected = getattr(text_config, "num_hidden_layers", len(layers))
    if len(layers) != expected or len({id(module) for module, _ in layers}) != len(layers):
        raise LoadError(
            f"model type {kind!r} is not supported: {len(layers)} attention calls for {expected} layers; each layer "
            "must call its attention exactly once through transformers' AttentionInterface (no state-space, "
            "convolution or shared layers)"
        )
    _check_layer_types(text_config, layers, max_model_len)
    return layers


def _check_layer_types(text_config: Any, layers: list[tuple[nn.Module, LayerSpec]], max_model_len: int) -> None:
    """Reject windows that exist only in transformers' mask, which is not built here."""
    layer_types = getattr(text_config, "layer_types", None) or ["full_attention"] * len(layers)
    for index, (layer_type, (_, spec)) in enumerate(zip(layer_types, layers)):
        where = f"model type {text_config.model_type!r}: layer {index}"
        if layer_type == "sliding_attention":
            window = getattr(text_config, "sliding_window", None)
            if spec.sliding_window is None and window is not None and window < max_model_len:
                raise LoadError(
                    f"{where} has a sliding window of {window} tokens that it does not pass to its attention; "
                    f"set max_model_len to at most {window}"
                )
        elif layer_type not in ("full_attention", "attention", "chunked_attention"):
            raise LoadError(f"{where} is of type {layer_type!r}; only full, sliding and chunked attention is supported")
