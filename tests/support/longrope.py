"""The choice of frequencies by the `longrope` rotary embedding of the installed transformers."""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

__all__ = ["longrope_is_capturable"]


def longrope_is_capturable() -> bool:
    """Whether frequencies are chosen without reading positions on the host; 5.17 reads them (docs/gpu.md)."""
    rope = dict(rope_type="longrope", rope_theta=100.0, long_factor=[2.0] * 4, short_factor=[1.0] * 4)
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters=rope | dict(original_max_position_embeddings=32),
    )
    module = LlamaRotaryEmbedding(config).to("meta")
    positions = torch.empty(1, 4, dtype=torch.int64, device="meta")  # has no contents to read
    try:
        module(torch.empty(1, 4, 32, device="meta"), positions)
    except (RuntimeError, NotImplementedError):
        return False
    return True
