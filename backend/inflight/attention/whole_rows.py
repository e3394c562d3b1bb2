"""Attention of encoders: each request's tokens attend to all of its tokens, which are all in the step.

Nothing is kept: a step's keys and values live as long as its layer.  Requests are computed one by one by SDPA, without
padding, so that what one gets does not depend on its neighbours.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec

__all__ = ["WholeRowAttention", "rows_of"]


class WholeRowAttention:
    """Implements `AttentionBackend` for layers that look both ways.

    A `sliding_window` of w lets a token attend to those less than w positions away, on either side.
    """

    name = "whole rows"
    capturable = False

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        return None

    def new_cache(
        self, num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Of any size: `write` replaces its tensors by those of the step."""
        return KVCache(torch.empty(0, dtype=dtype, device=device), torch.empty(0, dtype=dtype, device=device))

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Raises RuntimeError: a request has only a part of its tokens in the step."""
        starts = metadata.query_start_loc_cpu
        if any(length != starts[row + 1] - starts[row] for row, length in enumerate(metadata.seq_lens_cpu)):
            raise RuntimeError("an encoder's prompt is computed in one step, and this step has a part of one")
        return metadata

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: AttentionMetadata) -> None:
        cache.key, cache.value = key, value

    def attend(
        self, query: Tensor, cache: KVCache, batch: AttentionMetadata, spec: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_head_size)
        for start, end in rows_of(batch):
            q, k, v = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, cache.key, cache.value))
            found = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=_window(end - start, spec.sliding_window, query.device),
                scale=spec.scaling,
                enable_gqa=spec.num_heads > spec.num_kv_heads,
            )
            out[start:end] = found[0].transpose(0, 1)
        cache.key = cache.value = query.new_empty(0)  # they live as long as their layer: not until the next step
        return out


def rows_of(batch: AttentionMetadata) -> list[tuple[int, int]]:
    """The first token of each request among the step's, and the one behind its last; requests without any left out."""
    starts = batch.query_start_loc_cpu
    return [(start, end) for start, end in pairwise(starts) if start < end]


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool [length, length]: who attends to whom; None: all to all."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places[None, :]).abs() < window
