"""Tiny random checkpoints of many architectures, saved like real ones.

Weights are seeded and scaled so that greedy output varies instead of repeating one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 199  # a prime
POSITIONS = 256

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=POSITIONS,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    initializer_range=0.2,
)
_MOE: dict[str, Any] = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2)

# model type -> differences from _COMMON.  Windows are small, so that tests exceed them.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": dict(use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": dict(head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": dict(**_MOE, moe_intermediate_size=24, head_dim=8, norm_topk_prob=True),
    "mistral": dict(sliding_window=20, head_dim=8),
    "mixtral": dict(**_MOE, sliding_window=None),
    "gemma2": dict(head_dim=16, sliding_window=16, query_pre_attn_scalar=16),
    "gemma3_text": dict(head_dim=16, sliding_window=16, query_pre_attn_scalar=16, num_hidden_layers=6),
    "phi": dict(partial_rotary_factor=0.5),
    "phi3": dict(sliding_window=None, pad_token_id=0),
    "gpt2": dict(n_embd=32, n_head=4, n_layer=2, n_positions=POSITIONS),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32, init_std=0.2, pad_token_id=1, dropout=0.0),
    "olmo2": {},
    "granite": dict(attention_multiplier=0.3, logits_scaling=2.0, residual_multiplier=0.5),
    "starcoder2": dict(sliding_window=18),
    "cohere": dict(tie_word_embeddings=True, logit_scale=1.0),
    "smollm3": dict(pad_token_id=0),
    "llama4_text": dict(
        head_dim=8, intermediate_size_mlp=48, **_MOE, attention_chunk_size=POSITIONS, interleave_moe_layer_step=2
    ),
    "afmoe": dict(**_MOE, moe_intermediate_size=24, head_dim=8, num_shared_experts=1, sliding_window=16),
    "jetmoe": dict(num_local_experts=4, num_experts_per_tok=2, kv_channels=8),
    "phimoe": dict(num_local_experts=4, num_experts_per_tok=2, rope_theta=1e4, sliding_window=20, pad_token_id=0),
    "gpt_oss": dict(**_MOE, head_dim=16, sliding_window=16, pad_token_id=0),
}
# Others, for a test of their own.
FURTHER: dict[str, dict[str, Any]] = {
    "modernbert-decoder": dict(local_attention=16, pad_token_id=0, bos_token_id=0, cls_token_id=0, sep_token_id=0),
    "gpt_neox": dict(pad_token_id=0),
    "stablelm": dict(pad_token_id=0),
    "roberta": dict(is_decoder=True, pad_token_id=1, type_vocab_size=1),
}


@torch.no_grad()
def make_checkpoint(model_type: str, folder: Path, seed: int = 1234, **changes: Any) -> str:
    """Write a float32 checkpoint of `model_type` under `folder`; returns its directory."""
    values = {**_COMMON, **{**ARCHITECTURES, **FURTHER}[model_type], **changes}
    if model_type in ("gpt2", "opt"):
        values.pop("intermediate_size")
    config = AutoConfig.for_model(model_type, **values)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.3 if "embed" in name or "head" in name else 0.2, generator=generator)
        elif "norm" not in name.lower() and "ln_" not in name:
            parameter.normal_(0, 0.2, generator=generator)  # biases and sinks
    path = folder / model_type
    model.save_pretrained(path)
    return str(path)


def greedy_reference(
    path: str, prompts: list[list[int]], max_tokens: list[int], alone: bool = False
) -> list[list[int]]:
    """Output token ids of transformers' `generate()`, greedy, in float32.

    Args:
        alone: generate for one prompt after the other.  It takes three times as long, and matters where a model's
            angles depend on the longest sequence; `tests/backend/runner/test_parity.py` compares the two.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    pairs = list(zip(prompts, max_tokens))
    outputs = []
    for group in [[pair] for pair in pairs] if alone else [pairs]:
        width = max(len(prompt) for prompt, _ in group)
        ids, mask = torch.zeros(2, len(group), width, dtype=torch.long)
        for row, (prompt, _) in enumerate(group):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(count for _, count in group),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        outputs += [row[width : width + count].tolist() for row, (_, count) in zip(found, group)]
    return outputs
