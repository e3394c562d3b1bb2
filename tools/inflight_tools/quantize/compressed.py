"""Codes as compressed-tensors' format `pack-quantized` stores them.

Format: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_tools.quantize.decoder_walk import Scheme
from inflight_tools.quantize.gptq import Codes
from inflight_tools.quantize.source import HEAD

__all__ = ["quantization_config", "tensors_of"]

_VERSION = "0.20.0"  # of the package whose files these equal


def tensors_of(name: str, codes: Codes) -> dict[str, Tensor]:
    """weight_packed int32 [N, K * bits / 32]; weight_scale [N, G]; weight_zero_point int32 [N * bits / 32, G]; the
    shape."""
    return {
        f"{name}.weight_packed": _packed(codes.values, codes.bits),
        f"{name}.weight_scale": codes.scales.contiguous(),
        f"{name}.weight_zero_point": _packed(codes.zeros.t().contiguous(), codes.bits).t().contiguous(),
        f"{name}.weight_shape": torch.tensor(codes.values.shape, dtype=torch.int64),
    }


def _packed(values: Tensor, bits: int) -> Tensor:
    """uint8 [R, C] -> int32 [R, ceil(C * bits / 32)], the first code in the lowest bits.

    The format adds 2**(bits - 1) to signed codes, which makes them these.
    """
    values = F.pad(values, (0, -values.shape[1] % (32 // bits)))
    octets = values if bits == 8 else values[:, 0::2] | values[:, 1::2] << 4
    # The bytes of a little-endian machine, as safetensors expect; `view` wants a stride of 1 even for one word a row.
    return octets.flatten().view(torch.int32).view(len(values), -1)


def quantization_config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """Of config.json.

    Args:
        ignored: linear layers that stay as they are.
    """
    head = [f"re:.*{HEAD}"]  # by its name: for some readers it is no linear layer
    if scheme.head_bits == scheme.bits and HEAD not in ignored:
        groups = [_group(["Linear", *head], scheme.bits, scheme.group)]
    else:
        groups = [_group(["Linear"], scheme.bits, scheme.group)]
        if HEAD not in ignored:  # first, as some readers take the first group that fits
            groups.insert(0, _group(head, scheme.head_bits, scheme.group))
    return {
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": _VERSION,
    }


def _group(targets: list[str], bits: int, group_size: int) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": group_size,
        "num_bits": bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": None,
        "strategy": "group",
        "symmetric": False,
        "type": "int",
        "zp_dtype": "torch.int8",
    }
    return {
        "format": "pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": targets,
        "weights": weights,
    }
