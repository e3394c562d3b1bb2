"""Checkpoints whose weights are stored in fp8: compressed-tensors, DeepSeek's and AutoFP8's "fp8", FBGEMM's.

Weights are e4m3 with a scale per tensor, per output channel, or per block; actual weight = weight * scale.
transformers reads them as plain numbers, which loses nothing: every dtype that a model can have contains all of e4m3.
The scales are read here.  On a GPU with fp8 products the layers become `Fp8Linear`s with the same weights (those with a
scale per block are rounded once more, to a scale per channel); elsewhere the weights are multiplied by their scales.
With `kernel_config.block_fp8`, those with a scale per block become `BlockFp8Linear`s, which keep both as they are.

Inputs are always quantised row by row: scales for inputs in the checkpoint are coarser, and not used.

Format: https://github.com/vllm-project/compressed-tensors, https://huggingface.co/docs/transformers/quantization/finegrained_fp8
"""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from inflight.config import EngineConfig
from inflight.kernels.registry import select_block_fp8, select_ops
from inflight.loading.checkpoint import fp8_scheme
from inflight.loading.checkpoint.tensor_files import TensorFiles
from inflight.loading.checkpoint.weights import pretrained
from inflight.loading.load_errors import LoadError
from inflight.loading.quantization import fp8_linear
from inflight.loading.quantization.block_fp8_linear import BlockFp8Linear, stays_in_blocks, verify
from inflight.loading.quantization.fp8_linear import Fp8Linear, replace_linears
from inflight.ops.base import FusedOps, QuantizedRows

__all__ = ["METHODS", "load_fp8"]

_log = logging.getLogger(__name__)

METHODS = ("compressed-tensors", "fp8", "fbgemm_fp8")
_E4M3 = "F8_E4M3"  # as safetensors call it
_SCALES = ("weight_scale", "weight_scale_inv")  # the second is DeepSeek's; it is a factor, too
_WAY_OUT = 'use the model\'s unquantized checkpoint with quantization="fp8", or "int8" on a CPU'
# Tensors that the model's class has no place for: scales of weights, and those of inputs, which are not used.
_SCALE = re.compile(r"\.(weight_scale(_inv)?|input_scale(_ub)?)$")


def load_fp8(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model of a checkpoint in fp8, on `device`.

    Raises:
        LoadError: what its configuration or its files contain is not supported, by name.
    """
    values = fp8_scheme.quantization(hf_config)
    assert values is not None
    if reason := fp8_scheme.unsupported(values):
        raise LoadError(f"{config.model!r} ({hf_config.model_type}) cannot be loaded: {reason}; {_WAY_OUT}")
    plain = copy.deepcopy(hf_config)
    for part in (plain, plain.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    plainly = msgspec.structs.replace(config, quantization=None)
    model = pretrained(plainly, plain, dtype, torch.device("cpu"), read_elsewhere=_SCALE)
    files = TensorFiles(config.model, config.revision)
    try:
        scales = _scales_of(model, files)
        if not scales and values.get("config_groups", True):
            raise LoadError(f"none of its linear layers is stored as {_E4M3}, as its quantization_config says")
    except LoadError as error:
        raise LoadError(f"{config.model!r} ({hf_config.model_type}) cannot be loaded: {error}; {_WAY_OUT}") from error
    why = fp8_linear.unsupported(device, dtype) or fp8_scheme.unquantised_inputs(values)
    blocks = fp8_scheme.block_size(values)
    place = _Placement(files, scales, blocks, device, select_ops(device) if why is None else None)
    if stays_in_blocks(config, blocks, dtype):
        names = [name for name in scales if BlockFp8Linear.fits(model.get_submodule(name))]  # type: ignore[arg-type]
        replace_linears(model, names, place.in_blocks)
    elif why is None:
        names = [name for name in scales if fp8_linear.fits(model.get_submodule(name))]  # type: ignore[arg-type]
        replace_linears(model, names, place.in_fp8)
    else:
        names = []
        _log.info("the fp8 weights of %s are dequantised to %s: %s", config.model, str(dtype), why)
    for name in scales.keys() - set(names):
        place.dequantise(model.get_submodule(name), name)  # type: ignore[arg-type]
    return model.to(device)


def _scales_of(model: nn.Module, files: TensorFiles) -> dict[str, str]:
    """The linear layers whose weights are stored in e4m3, and the names of their scales.

    Raises:
        LoadError: a weight in eight bits that is not a linear layer's, or has no scale.
    """
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for name, dtype in files.dtypes.items():
        if not dtype.startswith("F8_") or name.endswith(_SCALES):
            continue
        layer, _, kind = name.rpartition(".")
        if isinstance(_deepest(modules, layer), nn.ModuleList):
            continue  # of a layer that the model does not have, such as one that predicts further tokens
        if kind != "weight" or dtype != _E4M3 or not isinstance(modules.get(layer), nn.Linear):
            raise LoadError(f"{name} is stored as {dtype}, which only linear layers can be, and only as {_E4M3}")
        scale = next((f"{layer}.{scale}" for scale in _SCALES if f"{layer}.{scale}" in files.dtypes), None)
        if scale is None:
            raise LoadError(f"{name} is stored as {dtype}, and its scale {layer}.{_SCALES[0]} is missing")
        found[layer] = scale
    return found


def _deepest(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """The last module on the path `name` that exists."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return modules[name]


class _Placement:
    """Gives linear layers with the numbers of e4m3 their scales.

    Args:
        scales: the scale's name in `files` for each layer's.
        blocks: rows and columns of a block, where scales are per block.
        ops: quantises inputs, and weights that had a scale per block; None if nothing stays in fp8.
    """

    def __init__(
        self,
        files: TensorFiles,
        scales: dict[str, str],
        blocks: list[int] | None,
        device: torch.device,
        ops: FusedOps | None,
    ) -> None:
        self._scales = scales
        self._tensors = files.read(scales.values())
        self._blocks = blocks
        self._device = device
        self._ops = ops
        self._verified: set[tuple[int, ...]] = set()

    def in_fp8(self, linear: nn.Linear, name: str) -> Fp8Linear:
        assert self._ops is not None
        scale = self._scale(linear, name)
        weight = linear.weight.data.to(self._device)
        if scale.shape[1] == 1:
            channels = scale.flatten().to(self._device).contiguous()
            rows = QuantizedRows(weight.to(torch.float8_e4m3fn), channels)
        else:
            rows = self._ops.quantize_rows(weight.float() * self._whole(scale, linear).to(self._device))
        return Fp8Linear.in_place_of(linear, rows, self._ops)

    def in_blocks(self, linear: nn.Linear, name: str) -> BlockFp8Linear | nn.Linear:
        """The layer with the checkpoint's own scales; dequantised if it has one scale, or one per output."""
        scale = self._scale(linear, name)
        assert self._blocks is not None
        rows, columns = self._blocks
        if scale.shape != (-(-linear.out_features // rows), -(-linear.in_features // columns)):
            self.dequantise(linear, name)
            return linear.to(self._device)
        weight = linear.weight.data.to(self._device).to(torch.float8_e4m3fn)
        if bool(weight.float().isnan().any()):  # the kernel has no NaN
            raise LoadError(f"{name}.weight has numbers that are not a number; download the checkpoint again")
        bias = None if linear.bias is None else linear.bias.data.to(self._device)
        scale, dtype = scale.to(self._device).contiguous(), linear.weight.dtype
        made = BlockFp8Linear(weight, scale, (rows, columns), bias, dtype, select_block_fp8())
        if (size := tuple(weight.shape)) not in self._verified:
            self._verified.add(size)
            verify(made, name)
        return made

    def dequantise(self, linear: nn.Linear, name: str) -> None:
        """In place; rounds once, to the weight's dtype."""
        scale = self._whole(self._scale(linear, name), linear)
        linear.weight.data = (linear.weight.data.float() * scale).to(linear.weight.dtype)

    def _scale(self, linear: nn.Linear, name: str) -> Tensor:
        """float32 [N, 1], or [rows of blocks, columns of blocks].

        Raises:
            LoadError: it has another shape, or a number that is not positive.
        """
        stored = self._scales[name]
        scale = self._tensors[stored].float()
        size = linear.out_features, linear.in_features
        if not bool(((scale >= 0) & scale.isfinite()).all()):
            raise LoadError(f"{stored} has a negative, infinite or undefined number; download the checkpoint again")
        if scale.numel() == 1:
            return scale.reshape(1, 1).expand(size[0], 1)
        if scale.numel() == size[0] and scale.shape in ((size[0],), (size[0], 1)):
            return scale.reshape(-1, 1)
        if self._blocks is not None and scale.shape == tuple(-(-n // block) for n, block in zip(size, self._blocks)):
            return scale
        raise LoadError(
            f"{stored} has shape {tuple(scale.shape)}, and the weight {size}: a scale is one number, one per output "
            f"channel, or one per block"
            + ("" if self._blocks is None else f" of {self._blocks[0]} x {self._blocks[1]}")
        )

    def _whole(self, scale: Tensor, linear: nn.Linear) -> Tensor:
        """A scale [N, 1], or [N, K] from one per block."""
        if scale.shape[1] == 1 and len(scale) == linear.out_features:
            return scale
        assert self._blocks is not None
        rows, columns = self._blocks
        wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return wide[: linear.out_features, : linear.in_features]
