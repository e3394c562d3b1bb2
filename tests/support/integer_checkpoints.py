"""Checkpoints with weights in integers, or in indices of a table, as GPTQ, AWQ and others write them: by numpy alone.

Written from the formats' descriptions, with nothing of the readers that they test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fp8_checkpoints import LINEAR, compressed_tensors, set_quantization
from safetensors.torch import load_file, save_file

__all__ = ["CONFIGS", "WRITERS", "Integers", "awq", "codebook", "compressed", "gptq", "rounded", "rows", "write"]

Arrays = dict[str, np.ndarray]

# The table of NF4: quantiles of the normal distribution, between -1 and 1.
NF4 = np.array(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0),
    ],
    dtype=np.float32,
)


@dataclass
class Integers:
    """weight[n, k] = (codes[n, k] - zeros[n, groups[k]]) * scales[n, groups[k]]

    Attributes:
        codes: uint8 [N, K]
        zeros: uint8 [N, G]
        scales: float16 or float32 [N, G]
        groups: int32 [K]
    """

    bits: int
    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray

    @property
    def weight(self) -> np.ndarray:
        """float32 [N, K]"""
        out = np.zeros(self.codes.shape, dtype=np.float32)
        for k, group in enumerate(self.groups):
            difference = self.codes[:, k].astype(np.int32) - self.zeros[:, group].astype(np.int32)
            out[:, k] = difference.astype(np.float32) * self.scales[:, group].astype(np.float32)
        return out


def rounded(weight: np.ndarray, bits: int, group: int, symmetric: bool, groups: np.ndarray | None = None) -> Integers:
    """The nearest integers, with scales in float16.

    Args:
        groups: the group of each input; default: `group` neighbours.
    """
    num_inputs = weight.shape[1]
    groups = np.arange(num_inputs, dtype=np.int32) // group if groups is None else groups
    top = 2**bits - 1
    parts = [weight[:, groups == index] for index in range(num_inputs // group)]
    if symmetric:
        scales = [np.abs(part).max(1) / (top // 2) for part in parts]
        zeros = [np.full(len(weight), top // 2 + 1) for _ in parts]
    else:
        low, high = ([np.minimum(part.min(1), 0) for part in parts], [np.maximum(part.max(1), 0) for part in parts])
        scales = [(most - least) / top for least, most in zip(low, high)]
        zeros = [np.clip(np.rint(-least / scale), 0, top) for least, scale in zip(low, scales)]
    scale, zero = np.stack(scales, 1).astype(np.float16), np.stack(zeros, 1)
    codes = np.rint(weight / scale.astype(np.float32)[:, groups]) + zero[:, groups]
    return Integers(bits, np.clip(codes, 0, top).astype(np.uint8), zero.astype(np.uint8), scale, groups)


def packed(codes: np.ndarray, bits: int, places: list[int] | None = None) -> np.ndarray:
    """[R, C] -> int32 [R, ceil(C / n)], with n = 32 / bits codes in a word.

    Args:
        places: of the n codes of a word, counted from the lowest bits; default: in order.
    """
    count = 32 // bits
    places = places or list(range(count))
    words = np.zeros((len(codes), -(-codes.shape[1] // count)), dtype=np.uint32)
    for column in range(codes.shape[1]):
        shift = bits * places[column % count]
        words[:, column // count] |= codes[:, column].astype(np.uint32) << np.uint32(shift)
    return words.view(np.int32)


def gptq(layer: Integers, version: int = 1, with_order: bool = True) -> Arrays:
    zeros = layer.zeros.astype(np.int64) - (version == 1) & 2**layer.bits - 1
    found = {
        "qweight": packed(layer.codes, layer.bits).T,
        "qzeros": packed(zeros.T, layer.bits),
        "scales": layer.scales.T,
    }
    return found | ({"g_idx": layer.groups} if with_order else {})


def awq(layer: Integers) -> Arrays:
    places = [0, 4, 1, 5, 2, 6, 3, 7]  # the inverse of the order 0 2 4 6 1 3 5 7
    return {
        "qweight": packed(layer.codes.T, 4, places),
        "qzeros": packed(layer.zeros.T, 4, places),
        "scales": layer.scales.T,
    }


def compressed(layer: Integers, is_packed: bool, symmetric: bool, strategy: str, with_order: bool = False) -> Arrays:
    half = 2 ** (layer.bits - 1)
    scales = layer.scales[0, :1] if strategy == "tensor" else layer.scales
    zeros = layer.zeros[0, :1] if strategy == "tensor" else layer.zeros
    found: Arrays = {"weight_scale": scales}
    if is_packed:
        found["weight_packed"] = packed(layer.codes, layer.bits)
        found["weight_shape"] = np.array(layer.codes.shape, dtype=np.int64)
    else:
        found["weight"] = (layer.codes.astype(np.int16) - half).astype(np.int8)
    if not symmetric:
        if is_packed and strategy != "tensor":
            found["weight_zero_point"] = packed(zeros.T, layer.bits).T
        else:
            found["weight_zero_point"] = (zeros.astype(np.int16) - half).astype(np.int8)
    return found | ({"weight_g_idx": layer.groups} if with_order else {})


def rows(weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
    """LLM.int8: the tensors, and the weight that they contain."""
    largest = np.abs(weight).max(1).astype(np.float32)
    codes = np.rint(weight / largest[:, None] * 127).astype(np.int8)
    arrays = {"weight": codes, "SCB": largest, "weight_format": np.array(0, dtype=np.uint8)}
    return arrays, codes.astype(np.float32) * (largest / np.float32(127))[:, None]


def codebook(weight: np.ndarray, block: int, nested_block: int | None = None) -> tuple[Arrays, np.ndarray]:
    """NF4: the tensors, and the weight that they contain."""
    flat = weight.flatten()
    padded = np.concatenate([flat, np.zeros(-len(flat) % block, dtype=np.float32)])
    absmax = np.abs(padded.reshape(-1, block)).max(1).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": weight.shape}
    arrays: Arrays = {}
    if nested_block is None:
        arrays["weight.absmax"] = absmax
    else:
        offset = float(absmax.mean())
        table = np.linspace(-1, 1, 256, dtype=np.float32)
        differences = np.concatenate([absmax - offset, np.zeros(-len(absmax) % nested_block)])
        largest = np.abs(differences.reshape(-1, nested_block)).max(1).astype(np.float32) + np.float32(1e-6)
        wide = np.repeat(largest, nested_block)[: len(absmax)]
        codes = np.abs(table - ((absmax - offset) / wide)[:, None]).argmin(1).astype(np.uint8)
        arrays |= {"weight.absmax": codes, "weight.nested_absmax": largest, "weight.nested_quant_map": table}
        state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": offset}
        absmax = table[codes] * wide + np.float32(offset)
    scales = np.repeat(absmax, block)[: len(flat)]
    codes = np.abs(NF4 - (flat / scales)[:, None]).argmin(1).astype(np.uint8)
    pairs = np.append(codes, 0)[: 2 * -(-len(codes) // 2)].reshape(-1, 2)
    arrays["weight"] = (pairs[:, 0] << 4 | pairs[:, 1])[:, None].astype(np.uint8)
    arrays["weight.quant_map"] = NF4
    arrays["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8)
    return arrays, (NF4[codes] * scales).reshape(weight.shape)


def _integers(format: str, bits: int, strategy: str, symmetric: bool) -> dict[str, Any]:
    """`quantization_config` as the compressed-tensors package writes it."""
    weights = dict(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, dynamic=False, actorder=None)
    weights["group_size"] = GROUP if strategy == "group" else None
    group = dict(targets=["Linear"], weights=weights, input_activations=None, output_activations=None, format=None)
    return compressed_tensors("tensor", None, format=format, config_groups={"group_0": group})


GROUP = 16
_ORDER = np.random.default_rng(5)
_FIRST = _ORDER.bit_generator.state
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False}
_AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int"}

CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": _GPTQ,
    "gptq act-order": {**_GPTQ, "desc_act": True, "sym": False},
    "gptq_v2 8 bits": {**_GPTQ, "bits": 8, "sym": False, "checkpoint_format": "gptq_v2", "group_size": -1},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    | {"modules_to_not_convert": ["lm_head"]},
    "auto-round gptq": {**_AUTO, "packing_format": "auto_round:auto_gptq"},
    "auto-round asymmetric": {**_AUTO, "sym": False, "packing_format": "auto_round"},
    "auto-round awq": {**_AUTO, "packing_format": "auto_round:auto_awq"},
    "pack-quantized group": _integers("pack-quantized", 4, "group", True),
    "pack-quantized asymmetric": _integers("pack-quantized", 4, "group", False),
    "pack-quantized channel 8 bits": _integers("pack-quantized", 8, "channel", False),
    "int-quantized": _integers("int-quantized", 8, "channel", True),
    "int-quantized tensor": _integers("int-quantized", 8, "tensor", False),
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 double": {"quant_method": "bitsandbytes", "_load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "LLM.int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}


def _with_weight(arrays: Arrays, layer: Integers) -> tuple[Arrays, np.ndarray]:
    return arrays, layer.weight


def _shuffled(weight: np.ndarray) -> Integers:
    groups = _ORDER.permutation(np.arange(weight.shape[1], dtype=np.int32) // GROUP)
    return rounded(weight, 4, GROUP, False, groups)


def _one_scale(weight: np.ndarray) -> Integers:
    """One scale and one zero point for the whole layer."""
    whole = rounded(weight.reshape(1, -1), 8, weight.size, False)
    zeros, scales = (np.repeat(x, len(weight), 0) for x in (whole.zeros, whole.scales))
    return Integers(8, whole.codes.reshape(weight.shape), zeros, scales, np.zeros(weight.shape[1], dtype=np.int32))


# name -> the tensors of a layer with (nearly) this weight, and the weight that they contain
WRITERS: dict[str, Callable[[np.ndarray], tuple[Arrays, np.ndarray]]] = {
    "gptq": lambda w: _with_weight(gptq(x := rounded(w, 4, GROUP, True)), x),
    "gptq act-order": lambda w: _with_weight(gptq(x := _shuffled(w)), x),
    "gptq_v2 8 bits": lambda w: _with_weight(gptq(x := rounded(w, 8, w.shape[1], False), 2, with_order=False), x),
    "awq": lambda w: _with_weight(awq(x := rounded(w, 4, GROUP, False)), x),
    "auto-round gptq": lambda w: _with_weight(gptq(x := rounded(w, 4, GROUP, True), 1, with_order=False), x),
    "auto-round asymmetric": lambda w: _with_weight(gptq(x := rounded(w, 4, GROUP, False), 2, with_order=False), x),
    "auto-round awq": lambda w: _with_weight(awq(x := rounded(w, 4, GROUP, True)), x),
    "pack-quantized group": lambda w: _with_weight(compressed(x := rounded(w, 4, GROUP, True), True, True, "group"), x),
    "pack-quantized asymmetric": lambda w: _with_weight(
        compressed(x := rounded(w, 4, GROUP, False), True, False, "group"), x
    ),
    "pack-quantized channel 8 bits": lambda w: _with_weight(
        compressed(x := rounded(w, 8, w.shape[1], False), True, False, "channel"), x
    ),
    "int-quantized": lambda w: _with_weight(
        compressed(x := rounded(w, 8, w.shape[1], True), False, True, "channel")
        | {"input_scale": np.array([0.02], dtype=np.float32)},
        x,
    ),
    "int-quantized tensor": lambda w: _with_weight(compressed(x := _one_scale(w), False, False, "tensor"), x),
    "nf4": lambda w: codebook(w, 64),
    "nf4 double": lambda w: codebook(w, 64, 16),
    "LLM.int8": rows,
}


def write(
    path: str, name: str, also: tuple[str, ...] = (), except_for: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Rewrite the checkpoint at `path`; returns the weights that its layers have now, by name, in float32.

    Args:
        also: further weights to quantize, such as "lm_head.weight".
        except_for: parts of names of layers that stay as they are.
    """
    _ORDER.bit_generator.state = _FIRST  # the same weights in any order of tests
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    actual: dict[str, torch.Tensor] = {}
    for whole in [each for each in tensors if LINEAR.search(each) or each in also]:
        if any(part in whole for part in except_for):
            continue
        layer = whole.removesuffix(".weight")
        arrays, weight = WRITERS[name](tensors.pop(whole).float().numpy())
        tensors |= {f"{layer}.{key}": torch.from_numpy(np.array(value)) for key, value in arrays.items()}
        actual[whole] = torch.from_numpy(weight)
    save_file({key: value.contiguous() for key, value in tensors.items()}, file, metadata={"format": "pt"})
    set_quantization(path, CONFIGS[name])
    return actual
