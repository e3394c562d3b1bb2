"""What a model's layers ask of attention, found by a forward pass under an implementation that only records.

A layer says it in two ways: by the arguments of its attention call and by its mask.  transformers builds masks from
functions of indices; the probe reads those functions at a model's full length, and gives the model a tensor that
names the mask in place of its values.  Whatever a layer hands to its attention is then one of these names, or it
has computed a mask of its own, which paging would drop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from inflight.attention.base import LayerSpec

__all__ = ["PROBE", "Probe", "UnsupportedAttention", "probing"]

PROBE = "inflight_probe"

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


@dataclass
class Probe:
    """What was recorded.

    Attributes:
        max_model_len: positions at which masks are read.
        layers: (attention module, spec) of each call, in order.
        windows: sliding window of each mask that was built, None for a full one; its place is its name.
    """

    max_model_len: int
    layers: list[tuple[nn.Module, LayerSpec]] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)

    def name_of(self, mask: Callable[..., Any], device: torch.device) -> int:
        self.windows.append(_window_of(mask, self.max_model_len, device))
        return len(self.windows) - 1

    def window_of(self, mask: Tensor, module: str) -> int | None:
        """The window that a named mask stands for."""
        name = mask.flatten()[0].item()
        if not bool((mask == name).all()) or name not in range(len(self.windows)):
            raise UnsupportedAttention(
                f"{module} computes an attention mask or bias of its own, which paged attention does not support"
            )
        return self.windows[int(name)]


_probe: Probe | None = None


@contextmanager
def probing(max_model_len: int) -> Iterator[Probe]:
    """Record the attention calls of models whose implementation is `PROBE` within the block."""
    global _probe
    before, _probe = _probe, Probe(max_model_len)
    try:
        yield _probe
    finally:
        _probe = before


def _current() -> Probe:
    if _probe is None:
        raise RuntimeError("the probe's attention was called outside of probing()")
    return _probe


def _window_of(mask: Callable[..., Any], max_model_len: int, device: torch.device) -> int | None:
    """The window of a mask function at lengths up to `max_model_len`; None if each token attends to all before it.

    Raises:
        UnsupportedAttention: the mask is something else.
    """
    zero = torch.zeros((), dtype=torch.long, device=device)
    keys = torch.arange(max_model_len, device=device)

    def visible(query: int) -> Tensor:
        row = torch.full_like(keys, query)
        found = mask(zero, zero, row, keys)
        return found.to(torch.bool).expand_as(keys) if isinstance(found, Tensor) else keys >= 0

    last = max_model_len - 1
    window = int(visible(last).sum())
    for query in sorted({0, 1, window - 1, window, last // 2, max(0, last - 1), last} & set(range(max_model_len))):
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(visible(query), expected):
            raise UnsupportedAttention(
                f"the token at position {query} of {max_model_len} attends to others than those before it within a "
                "window (a chunked, bidirectional or block mask), which paged attention does not support at "
                "this max_model_len"
            )
    return None if window == max_model_len else window


def _named_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """A mask [B, 1, q_length, kv_length] whose values are its name."""
    name = _current().name_of(mask_function, torch.device(device))
    return torch.full((batch_size, 1, q_length, kv_length), name, dtype=torch.float32, device=device)


def _record(
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
    probe, name = _current(), type(module).__name__
    if attention_mask is not None:
        sliding_window = probe.window_of(attention_mask, name)
    elif kwargs.get("is_causal") is False:
        raise UnsupportedAttention(f"{name} is not causal (is_causal=False); only decoders are supported")
    unknown = sorted(key for key, value in kwargs.items() if value is not None and key not in _IGNORED)
    if unknown:
        raise UnsupportedAttention(f"{name} passes {', '.join(unknown)} to its attention, which is not supported")
    if query.shape[2] != key.shape[2]:
        raise UnsupportedAttention(f"{name} attends to another sequence (cross-attention), which is not supported")
    spec = LayerSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_head_size=key.shape[3],
        value_head_size=value.shape[3],
        scaling=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
        sliding_window=sliding_window,
        softcap=softcap,
        has_sinks=s_aux is not None,
    )
    probe.layers.append((module, spec))
    to_itself = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return to_itself.transpose(1, 2).contiguous(), None


AttentionInterface.register(PROBE, _record)
AttentionMaskInterface.register(PROBE, _named_mask)
