"""The fastest forward pass that says what the plain one says.

On a CPU, in order: the whole decoder as one native call (`fusion.py`), transformers' modules around packed
linear layers (`packed_linear.py`), transformers' modules as they are.  On a GPU: transformers' modules with
their small operations in kernels of ours (`fused_modules.py`), or as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inflight.loading.fused_modules import fuse_modules
from inflight.loading.fusion import fuse
from inflight.loading.packed_linear import pack_linears
from inflight.ops.selection import FusedOps, select_ops

__all__ = ["CannotQuantize", "accelerate", "use_ops"]

_log = logging.getLogger(__name__)


class CannotQuantize(RuntimeError):
    """The model does not run in eight bits; the message says why."""


def accelerate(model: nn.Module, device: torch.device, passes: Callable[[Any], bool], int8: bool = False) -> Any:
    """What to call instead of `model`, which is on `device` and has its attention attached.

    Args:
        passes: whether a candidate's logits are right; what fails is taken back, with a line in the log.
        int8: hold the weights of linear layers in eight bits, on a CPU.

    Returns:
        A callable with the arguments and the result of `model`; `model` itself may be changed.

    Raises:
        CannotQuantize: with `int8`, where neither way runs or passes.
    """
    if device.type != "cpu":
        return use_ops(model, select_ops(device), passes)
    name = type(model).__name__
    fused = fuse(model, int8)
    if isinstance(fused, str):
        _log.info("%s runs through transformers: %s", name, fused)
    else:
        decoder, undo_fusion = fused
        if _tried(decoder, passes):
            return decoder
        undo_fusion()
        _log.warning("%s runs through transformers: the native forward pass gives other logits", name)
    undo = pack_linears(model, int8)
    if int8 and undo is None:
        raise CannotQuantize(f"{name} has no linear layer that can be packed here")
    if undo is not None and not _tried(model, passes):
        if int8:
            raise CannotQuantize(f"{name} gives other logits with weights in eight bits")
        undo()
        _log.warning("%s runs on torch's linear layers: the packed ones give other logits", name)
    return model


def use_ops(model: nn.Module, ops: FusedOps, passes: Callable[[Any], bool]) -> nn.Module:
    """`model`, with `ops` in its modules where its logits stay right."""
    undo = fuse_modules(model, ops)
    if undo is not None and not _tried(model, passes):
        undo()
        _log.warning("%s runs on its own operations: the %s ones give other logits", type(model).__name__, ops.name)
    return model


def _tried(candidate: Any, passes: Callable[[Any], bool]) -> bool:
    try:
        return passes(candidate)
    except (AttributeError, RuntimeError, TypeError) as error:  # code that looks into the modules replaced
        _log.warning("%s: %s", type(candidate).__name__, error)
        return False
