"""The fastest forward pass on a CPU that says what the plain one says.

In order: the whole decoder as one native call (`fusion.py`), transformers' modules around packed linear
layers (`packed_linear.py`), transformers' modules as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from inflight.runner.fusion import fuse
from inflight.runner.packed_linear import pack_linears

__all__ = ["accelerate"]

_log = logging.getLogger(__name__)


def accelerate(model: nn.Module, passes: Callable[[Any], bool]) -> Any:
    """What to call instead of `model`, which is on a CPU and has its attention attached.

    Args:
        passes: whether a candidate's logits are right; what fails is taken back, with a line in the log.

    Returns:
        A callable with the arguments and the result of `model`; `model` itself may be changed.
    """
    name = type(model).__name__
    fused = fuse(model)
    if isinstance(fused, str):
        _log.info("%s runs through transformers: %s", name, fused)
    else:
        decoder, undo_fusion = fused
        if _tried(decoder, passes):
            return decoder
        undo_fusion()
        _log.warning("%s runs through transformers: the native forward pass gives other logits", name)
    undo = pack_linears(model)
    if undo is not None and not _tried(model, passes):
        undo()
        _log.warning("%s runs on torch's linear layers: the packed ones give other logits", name)
    return model


def _tried(candidate: Any, passes: Callable[[Any], bool]) -> bool:
    try:
        return passes(candidate)
    except (AttributeError, RuntimeError, TypeError) as error:  # code that looks into the modules replaced
        _log.warning("%s: %s", type(candidate).__name__, error)
        return False
