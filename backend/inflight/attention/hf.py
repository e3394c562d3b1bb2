"""Registration with transformers' `AttentionInterface`.

Any decoder that calls attention through the interface runs on the paged pool unchanged: the function
registered here receives query, key and value with positions already applied.  Without a registered mask
function transformers builds no mask; what a layer's mask says is in its spec (`loading/recognise/attention_probe.py`).
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface

from inflight.attention.base import LayerAttention, current_batch

__all__ = ["IMPLEMENTATION"]

IMPLEMENTATION = "inflight"


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None)."""
    layer = cast(LayerAttention, module.inflight)
    batch = current_batch()
    layer.backend.write(key[0].transpose(0, 1), value[0].transpose(0, 1), layer.cache, batch)
    out = layer.backend.attend(query[0].transpose(0, 1), layer.cache, batch, layer.spec, s_aux)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)
