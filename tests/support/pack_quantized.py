"""Decodes checkpoints in compressed-tensors' `pack-quantized`, by numpy alone: nothing of what writes or reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["decoded", "dequantized_copy", "tensors_in"]


def decoded(tensors: dict[str, Tensor], bits: int, group: int) -> np.ndarray:
    """float32 [N, K]: the weight in a layer's tensors, which are named as in the layer."""
    rows, columns = tensors["weight_shape"].tolist()
    codes = _codes(tensors["weight_packed"].numpy(), bits, columns)
    zeros = _codes(np.ascontiguousarray(tensors["weight_zero_point"].numpy().T), bits, rows).T
    scales = tensors["weight_scale"].float().numpy()
    groups = np.arange(columns) // group
    return (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups]


def _codes(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """int32 [R, W] -> int64 [R, count], lowest bits first."""
    in_word = 32 // bits
    wide = words.view(np.uint32).astype(np.int64)
    return np.stack(
        [wide[:, index // in_word] >> bits * (index % in_word) & 2**bits - 1 for index in range(count)], axis=1
    )


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Of all files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def dequantized_copy(folder: Path, copy: Path, group: int = 32, head_bits: int = 16) -> str:
    """Write the plain checkpoint that a quantized one stands for, in float32."""
    copy.mkdir()
    tensors = tensors_in(folder)
    for layer in [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]:
        names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
        own = {name: tensors.pop(f"{layer}.{name}") for name in names}
        bits = head_bits if layer == "lm_head" else 4
        tensors[f"{layer}.weight"] = torch.from_numpy(decoded(own, bits, group))
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)
