"""The attention layers of an encoder: a forward pass under an attention implementation that only records.

A layer says what it needs by the arguments of its attention call; what it does not say (a mask, a bias of its own)
shows in the check at load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from inflight.attention.base import LayerSpec
from inflight.attention.hf import IMPLEMENTATION
from inflight.loading.load_errors import LoadError, in_models_code
from inflight.loading.recognise.attention_probe import IGNORED_ARGUMENTS

__all__ = ["encoder_layers"]

_IMPLEMENTATION = "inflight_encoder_probe"
_NUM_TOKENS = 3

_found: list[tuple[nn.Module, LayerSpec]] = []


@torch.inference_mode()
def encoder_layers(model: nn.Module, device: torch.device) -> list[tuple[nn.Module, LayerSpec]]:
    """(attention module, spec) of each layer, in order.

    Raises:
        LoadError: a layer needs something that is not supported.
    """
    kind = model.config.model_type  # type: ignore[union-attr]
    _found.clear()
    model.set_attn_implementation(_IMPLEMENTATION)  # type: ignore[operator]
    try:
        model(input_ids=torch.arange(_NUM_TOKENS, device=device)[None])
        return list(_found)
    except (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError) as error:
        raise LoadError(
            f"model type {kind!r} is not supported: it does not run on token ids alone: {type(error).__name__}: "
            f"{error}{in_models_code(error)}"
        ) from error
    finally:
        _found.clear()
        model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None)."""
    name = type(module).__name__
    given = {**kwargs, "attention_mask": attention_mask}
    ignored = {*IGNORED_ARGUMENTS, "deterministic"}  # of gradients
    unknown = sorted(key for key, value in given.items() if value is not None and key not in ignored)
    if unknown:
        raise ValueError(f"{name} passes {', '.join(unknown)} to its attention")
    spec = LayerSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_head_size=key.shape[3],
        value_head_size=value.shape[3],
        scaling=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
        sliding_window=sliding_window,
    )
    _found.append((module, spec))
    to_itself = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return to_itself.transpose(1, 2).contiguous(), None


AttentionInterface.register(_IMPLEMENTATION, _record)
