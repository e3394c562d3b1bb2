"""The fastest forward pass whose logits are right.

On a CPU, in order of preference: the whole decoder as one native call (`native_decoder.py`), transformers'
modules with packed linear layers (`packed_linear.py`), transformers' modules unchanged.  On a GPU:
transformers' modules with fused small operations (`fused_decoder.py`), or unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inflight.kernel_config import KernelConfig
from inflight.kernels.registry import select_ops
from inflight.load_phases import enter_phase
from inflight.loading.forward.fused_decoder import fuse_modules
from inflight.loading.forward.native_decoder import native_decoder
from inflight.loading.forward.packed_experts import pack_others
from inflight.loading.forward.packed_linear import pack_linears
from inflight.loading.quantization.base import Scheme
from inflight.loading.quantization.coded_linear import CodedLinear, dequantise
from inflight.ops.base import FusedOps

__all__ = ["CannotQuantize", "accelerate", "use_ops"]

_log = logging.getLogger(__name__)


class CannotQuantize(RuntimeError):
    """The model cannot run with weights stored as was asked for; the message says why."""


def accelerate(
    model: nn.Module,
    device: torch.device,
    passes: Callable[[Any], bool],
    num_positions: int,
    scheme: Scheme,
    kernels: KernelConfig,
) -> Any:
    """The callable to use instead of `model`, which is on `device` and has its attention attached.

    Args:
        passes: whether a candidate's logits are right; if not, the change is undone and logged.
        num_positions: positions that requests can have.
        scheme: how the weights of linear layers are stored.
        kernels: switches of GPU kernels.

    Returns:
        A callable with the arguments and the result of `model`; `model` itself can be changed.

    Raises:
        CannotQuantize: no forward pass with weights stored so runs and passes.
    """
    if device.type != "cpu":
        return use_ops(model, select_ops(device, kernels.launch_pdl), passes, num_positions)
    name = type(model).__name__
    enter_phase("packing the weights")
    native = native_decoder(model, scheme.cpu_formats)
    if isinstance(native, str):
        _log.info("%s runs through transformers: %s", name, native)
    else:
        decoder, undo_native = native
        if _passes(decoder, passes):
            return decoder
        undo_native()
        _log.warning("%s runs through transformers: the native forward pass computes other logits", name)
    undo = pack_linears(model, scheme.cpu_formats)
    if scheme.needs_packing and undo is None:
        raise CannotQuantize(f"{name} has no linear layer that can be packed")
    if undo is not None and not _passes(model, passes):
        if scheme.needs_packing:
            raise CannotQuantize(f"{name} computes other logits with weights in {scheme.name}")
        undo()
        _log.warning("%s runs on torch's linear layers: the packed ones compute other logits", name)
    _dequantise_rest(model)
    undo_others = pack_others(model)
    if undo_others is not None and not _passes(model, passes):
        undo_others()
        _log.warning("%s runs on torch's products: the packed experts compute other logits", name)
    return model


def _dequantise_rest(model: nn.Module) -> None:
    """Layers in codes that the kernel does not multiply would compute their definition, which is slow."""
    rest = {name: module for name, module in model.named_modules() if isinstance(module, CodedLinear)}
    for name, linear in rest.items():
        model.set_submodule(name, dequantise(linear))
    if rest:
        _log.warning("%d layers of %s in codes are dequantised", len(rest), type(model).__name__)


def use_ops(model: nn.Module, ops: FusedOps, passes: Callable[[Any], bool], num_positions: int) -> nn.Module:
    """`model`, with `ops` in its modules, unless that makes its logits wrong."""
    undo = fuse_modules(model, ops, num_positions)
    if undo is not None and not _passes(model, passes):
        undo()
        name = type(model).__name__
        _log.warning("%s runs on transformers' operations: the %s ones compute other logits", name, ops.name)
    return model


def _passes(candidate: Any, passes: Callable[[Any], bool]) -> bool:
    try:
        return passes(candidate)
    except (AttributeError, RuntimeError, TypeError) as error:  # the model's code accesses a replaced module
        _log.warning("%s: %s", type(candidate).__name__, error)
        return False
