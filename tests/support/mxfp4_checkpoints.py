"""Checkpoints of gpt-oss with experts in MXFP4, as OpenAI publishes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES

__all__ = ["QUANTIZATION", "make_mxfp4_checkpoint", "pack_experts"]

QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def pack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the experts among a checkpoint's tensors by codes; returns the numbers that they stand for."""
    numbers: dict[str, Tensor] = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        weights = tensors.pop(name).float().transpose(1, 2)  # [E, outputs, inputs]
        blocks = weights.reshape(*weights.shape[:2], -1, 32)
        exponents = blocks.abs().amax(-1, keepdim=True).log2().floor().clamp(-100, 100) - 2  # the largest number is 6
        codes = (torch.tensor(FP4_VALUES) - (blocks / 2**exponents)[..., None]).abs().argmin(-1)
        tensors[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents.squeeze(-1) + 127).to(torch.uint8)
        numbers[name] = (torch.tensor(FP4_VALUES)[codes] * 2**exponents).flatten(2).transpose(1, 2).contiguous()
    return numbers


def make_mxfp4_checkpoint(folder: Path, **changes: Any) -> str:
    """Write a small checkpoint under `folder`; returns its directory."""
    sizes = dict(hidden_size=64, intermediate_size=32, num_local_experts=5, num_experts=5)
    path = make_checkpoint("gpt_oss", folder, **{**sizes, **changes})
    file, config = Path(path) / "model.safetensors", Path(path) / "config.json"
    tensors = load_file(file)
    pack_experts(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": QUANTIZATION}))
    return path
