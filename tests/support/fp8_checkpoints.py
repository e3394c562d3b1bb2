"""Checkpoints with weights in fp8, in the formats of the tools that make them: compressed-tensors, "fp8", FBGEMM's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["SCHEMES", "compress", "compress_blocks", "compressed_tensors"]

E4M3 = torch.float8_e4m3fn
LINEAR = re.compile(r"\.layers\.\d+\..*\.(\w+_proj|fc\d|dense)\.weight$")


def compressed_tensors(strategy: str, inputs: str | None, **changes: Any) -> dict[str, Any]:
    """`quantization_config` as the compressed-tensors package writes it."""
    common = dict(actorder=None, block_structure=[16, 16] if strategy == "block" else None, group_size=None)
    weights = common | dict(
        num_bits=8, type="float", symmetric=True, strategy=strategy, dynamic=False, observer="minmax"
    )
    activations = dict(num_bits=8, type="float", symmetric=True, strategy=inputs, dynamic=inputs != "tensor")
    group = dict(
        targets=["Linear"],
        weights=weights,
        input_activations=activations if inputs else None,
        output_activations=None,
        format=None,
    )
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
        **changes,
    }


def per_tensor(weight: Tensor) -> Tensor:
    return (weight.abs().max() / 448).reshape(1)


def per_channel(weight: Tensor) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / 448


def per_block(weight: Tensor, size: int = 16) -> Tensor:
    """One for each size x size elements, also of blocks that the edge cuts."""
    rows, columns = (-(-n // size) for n in weight.shape)
    padded = torch.zeros(rows * size, columns * size)
    padded[: weight.shape[0], : weight.shape[1]] = weight.abs()
    return padded.view(rows, size, columns, size).amax((1, 3)) / 448


def spread(scale: Tensor, weight: Tensor, size: int = 16) -> Tensor:
    """The scale of each element."""
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[: weight.shape[0], : weight.shape[1]]
    return scale


# name -> quantization_config, the scale of a weight, the scale's name, and further tensors of each layer
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor], str, dict[str, Tensor]]] = {
    "per channel": (compressed_tensors("channel", "token"), per_channel, "weight_scale", {}),
    "per tensor, static inputs": (
        compressed_tensors("tensor", "tensor"),
        per_tensor,
        "weight_scale",
        {"input_scale": torch.tensor([0.02])},
    ),
    "per block": (compressed_tensors("block", "group"), per_block, "weight_scale", {}),
    "AutoFP8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        lambda weight: per_tensor(weight).reshape(()),
        "weight_scale",
        {"input_scale": torch.tensor(0.02)},
    ),
    "DeepSeek": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 16]},
        per_block,
        "weight_scale_inv",
        {},
    ),
    "FBGEMM": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        per_channel,
        "weight_scale",
        {"input_scale_ub": torch.tensor([1200.0])},
    ),
}


def compress(path: str, scheme: str) -> dict[str, Tensor]:
    """Rewrite the checkpoint at `path`; returns the weights that its linear layers have now, by name, in float32."""
    quantization, scale_of, scale_name, more = SCHEMES[scheme]
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    actual: dict[str, Tensor] = {}
    for name in [name for name in tensors if LINEAR.search(name)]:
        weight, layer = tensors[name].float(), name.removesuffix(".weight")
        scale = scale_of(weight)
        whole = spread(scale, weight)
        tensors[name] = (weight / whole).clamp(-448, 448).to(E4M3)
        tensors[f"{layer}.{scale_name}"] = scale
        tensors |= {f"{layer}.{key}": value.clone() for key, value in more.items()}
        actual[name] = tensors[name].float() * whole
    save_file(tensors, file, metadata={"format": "pt"})
    set_quantization(path, quantization)
    return actual


def set_quantization(path: str, quantization: dict[str, Any]) -> None:
    config = Path(path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))


def compress_blocks(path: str, size: int = 128) -> dict[str, Tensor]:
    """As `compress`, in DeepSeek's format with blocks of size x size; of layers with several blocks a row."""
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    actual: dict[str, Tensor] = {}
    for name in [name for name in tensors if LINEAR.search(name)]:
        weight = tensors[name].float()
        scale = per_block(weight, size)
        whole = spread(scale, weight, size)
        tensors[name] = (weight / whole).clamp(-448, 448).to(E4M3)
        tensors[f"{name}_scale_inv"] = scale
        actual[name] = tensors[name].float() * whole
    save_file(tensors, file, metadata={"format": "pt"})
    set_quantization(path, SCHEMES["DeepSeek"][0] | {"weight_block_size": [size, size]})
    return actual
