"""Registration with transformers' `AttentionInterface`, and the probe that finds a model's layers.

Any decoder that calls attention through the interface runs on the paged pool unchanged: the function
registered here receives query, key and value with positions already applied.  Without a registered mask
function transformers builds no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface

from inflight.attention.base import LayerAttention, LayerSpec, current_batch

__all__ = ["IMPLEMENTATION", "UnsupportedAttention", "probe_layers"]

IMPLEMENTATION = "inflight"

# Keyword arguments that do not affect a forward pass without gradients, padding and transformers' cache.
_IGNORED = {
    "cache_position",
    "dropout",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "training",
    "use_cache",
}


class UnsupportedAttention(ValueError):
    """A layer needs a feature that paged attention does not support; the message names it."""


_probe: list[tuple[nn.Module, LayerSpec]] | None = None


@contextmanager
def probe_layers() -> Iterator[list[tuple[nn.Module, LayerSpec]]]:
    """Record attention calls within the block instead of running them on the pool.

    Yields:
        A list to which each call appends (attention module, spec).
    """
    global _probe
    _probe = []
    try:
        yield _probe
    finally:
        _probe = None


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None)."""
    if _probe is not None:
        spec = _spec_of(module, query, key, value, attention_mask, scaling, sliding_window, softcap, s_aux, kwargs)
        _probe.append((module, spec))
        return _attend_to_itself(value, query.shape[1]), None
    layer = cast(LayerAttention, module.inflight)
    batch = current_batch()
    layer.backend.write(key[0].transpose(0, 1), value[0].transpose(0, 1), layer.cache, batch)
    out = layer.backend.attend(query[0].transpose(0, 1), layer.cache, batch, layer.spec, s_aux)
    return out[None], None


def _spec_of(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    kwargs: dict[str, Any],
) -> LayerSpec:
    name = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedAttention(f"{name} builds an attention mask, which paged attention does not support")
    if kwargs.get("is_causal") is False:
        raise UnsupportedAttention(f"{name} is not causal (is_causal=False); only decoders are supported")
    unknown = sorted(key for key, value in kwargs.items() if value is not None and key not in _IGNORED)
    if unknown:
        raise UnsupportedAttention(f"{name} passes {', '.join(unknown)} to its attention, which is not supported")
    if query.shape[2] != key.shape[2]:
        raise UnsupportedAttention(f"{name} attends to another sequence (cross-attention), which is not supported")
    return LayerSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_head_size=key.shape[3],
        value_head_size=value.shape[3],
        scaling=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
        sliding_window=sliding_window,
        softcap=softcap,
        has_sinks=s_aux is not None,
    )


def _attend_to_itself(value: Tensor, num_heads: int) -> Tensor:
    """The probe's attention output [1, T, Hq, Dv]: each token attends only to itself."""
    return value.repeat_interleave(num_heads // value.shape[1], dim=1).transpose(1, 2)


AttentionInterface.register(IMPLEMENTATION, _paged_attention)
