"""Writes LoRA adapters as PEFT does, for the demo model or another of llama's shape; no torch, unlike `adapters.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from frontend_rig import CHECKPOINT
from safetensors.numpy import save_file

__all__ = ["write_adapter"]

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    seed: int = 0,
    rank: int = 4,
    size: float = 1.0,
    checkpoint: Path = CHECKPOINT,
    targets: Sequence[str] = _TARGETS,
    **config: Any,
) -> Path:
    """Random matrices; returns the folder.

    Args:
        size: of what the adapter adds, beside weights of a usual size; 0: it changes nothing.
        config: keys of adapter_config.json.
    """
    shape = json.loads((checkpoint / "config.json").read_text())
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    head = shape.get("head_dim") or hidden // heads
    q, kv = heads * head, shape["num_key_value_heads"] * head
    sizes = {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for target in targets:
            fan_in, fan_out = sizes[target]
            room = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            key = f"base_model.model.model.layers.{layer}.{room}.{target}"
            tensors[f"{key}.lora_A.weight"] = random.normal(0, fan_in**-0.5, (rank, fan_in)).astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = random.normal(0, 0.1 * size, (fan_out, rank)).astype(np.float32)
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
        **config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
