"""Bytes that a checkpoint's codes take less, where they are kept, than plain weights in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from inflight.config import EngineConfig
from inflight.gguf.architectures import tensor_names
from inflight.gguf.header import GgufError, read_header
from inflight.hub import gguf_file
from inflight.kernels.cpu.stored_codes import StoredCodes
from inflight.loading.quantization import int4_linear
from inflight.loading.quantization.block_weight import BLOCK_KINDS
from inflight.loading.quantization.coded_linear import keeps_codes

__all__ = ["Stored", "saved_by_codes"]

_PACKED, _SCALES = ("qweight", "weight_packed"), ("scales", "weight_scale")  # of codes in int32
_ZERO_AND_SCALE = 3  # bytes: with zero points in bytes


class Stored(Protocol):
    """A tensor in a file; `code` is its dtype's name if that has eight bits or less."""

    @property
    def shape(self) -> list[int]: ...

    @property
    def code(self) -> str | None: ...


def saved_by_codes(
    config: EngineConfig, model: nn.Module, stored: Mapping[str, Stored], dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes of the parameters of `model` in their place, less those of the codes; negative if more are made.

    Args:
        model: without memory.
        stored: the checkpoint's tensors; those of a GGUF file are read from it.
    """
    on_cpu = keeps_codes(config, device)
    file = gguf_file(config.model, config.revision)
    if file is not None:
        return _of_blocks(file, model) if on_cpu else 0
    if not on_cpu and not int4_linear.stays_in_codes(config.quantization, device, dtype):
        return 0
    saved = 0
    for weight, bits, scales in _layers(model, stored):
        num_outputs, num_inputs = weight.shape
        group = weight.numel() // max(scales, num_outputs)
        if on_cpu:
            fits = StoredCodes.fits(num_inputs, group, bits)
        else:
            fits = bits == 4 and scales >= num_outputs and int4_linear.fits(num_inputs, group)
        if fits:
            saved += weight.nbytes - weight.numel() * bits // 8 - _ZERO_AND_SCALE * max(scales, num_outputs)
    return saved


def _layers(model: nn.Module, stored: Mapping[str, Stored]) -> Iterator[tuple[Tensor, int, int]]:
    """The plain weight, the bits of its codes, and the number of scales of each layer in integers."""
    prefix = f"{model.base_model_prefix}."
    plain = {name.removeprefix(prefix): part for name, part in model.named_parameters()}
    for name, codes in stored.items():
        layer, _, kind = name.rpartition(".")
        weight = plain.get(f"{layer.removeprefix(prefix)}.weight")
        if weight is None or weight.dim() != 2:
            continue  # nothing of this model
        found = [stored[f"{layer}.{scale}"] for scale in _SCALES if f"{layer}.{scale}" in stored]
        scales = prod(found[0].shape) if found else 0
        if kind in _PACKED:
            yield weight, 32 * prod(codes.shape) // weight.numel(), scales
        elif codes.code == "I8" and found:
            yield weight, 8, scales


def _of_blocks(file: Path, model: nn.Module) -> int:
    try:
        header = read_header(file)
        names = tensor_names(header)
    except GgufError:
        return 0  # the loader says why
    saved, linears = 0, {f"{name}.weight": part for name, part in model.named_modules() if type(part) is nn.Linear}
    for source, name in names.items():
        info, linear = header.tensors[source], linears.get(name)
        if name == "model.embed_tokens.weight" and "output.weight" not in names:
            linear = linears.get("lm_head.weight")  # has the codes besides the table
            saved -= 0 if linear is None else linear.weight.nbytes  # which nothing takes the place of
        kind = BLOCK_KINDS.get(info.type.name)
        if linear is not None and kind is not None and kind.bits is not None:
            wider = kind.numbers // 8 if kind.name.startswith("Q5") else 0  # five bits in six
            wider += 4 if kind.name in ("Q4_K", "Q5_K") else 0  # six bits of a scale in eight
            saved += linear.weight.nbytes - prod(info.shape) // kind.numbers * (kind.num_bytes + wider)
    return saved
