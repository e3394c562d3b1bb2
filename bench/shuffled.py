"""The same model with its channels in another order: this changes only the groups in which weights are quantized.

A checkpoint that was made of codes has weights on a grid in each group, which a format with the same groups repeats: it
says nothing about rounding.  In another order, a group has weights of many grids, as if they were plain numbers.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

__all__ = ["write_shuffled"]


def write_shuffled(folder: Path, output: Path) -> Path:
    """Write the llama in `folder` to `output`, in float32, with its channels in an order drawn by seed 0."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _shuffle(model)
    model.save_pretrained(output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, output)
    return output


@torch.no_grad()
def _shuffle(model: nn.Module) -> None:
    """Channels of the residual stream, of the values of each KV head, and of the inside of each MLP."""
    generator, config = torch.Generator().manual_seed(0), model.config
    size = config.hidden_size // config.num_attention_heads
    hidden = torch.randperm(config.hidden_size, generator=generator)
    reorder(model.model.embed_tokens, inputs=hidden)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        reorder(model.lm_head, inputs=hidden)
    model.model.norm.weight.copy_(model.model.norm.weight[hidden])
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        inner = torch.randperm(config.intermediate_size, generator=generator)
        heads = [torch.randperm(size, generator=generator) for _ in range(config.num_key_value_heads)]
        values = torch.cat([head * size + order for head, order in enumerate(heads)])
        per_head = config.num_attention_heads // config.num_key_value_heads
        attended = torch.cat([head * size + heads[head // per_head] for head in range(config.num_attention_heads)])
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.copy_(norm.weight[hidden])
        for linear in (attention.q_proj, attention.k_proj):
            reorder(linear, inputs=hidden)
        reorder(attention.v_proj, inputs=hidden, outputs=values)
        reorder(attention.o_proj, inputs=attended, outputs=hidden)
        for linear in (mlp.gate_proj, mlp.up_proj):
            reorder(linear, inputs=hidden, outputs=inner)
        reorder(mlp.down_proj, inputs=inner, outputs=hidden)


def reorder(layer: nn.Module, inputs: Tensor, outputs: Tensor | None = None) -> None:
    weight = layer.weight[:, inputs]
    layer.weight.copy_(weight if outputs is None else weight[outputs])
