"""A transformers model's small operations by `FusedOps`, module by module, in place.

On a GPU a decode step of an eager model is limited by the host: about twenty-five launches per layer, most of
them for norms, rotary embedding and gates.  Here a layer of the llama family takes about a dozen:

    norm | merged query, key, value | norms of heads | rotary | write, attend | output
    add + norm | merged gate, up | silu and mul | down | add

Modules that are not recognised (`recognition.py`) are unchanged.  Merged weights take no extra memory: the
modules' parameters become views of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from inflight.loading.recognition import (
    Attention,
    DecoderLayer,
    GatedMlp,
    NotRecognised,
    RmsNorm,
    attention,
    check,
    decoder_layer,
    gated_mlp,
    rms_norm,
)
from inflight.ops.base import FusedOps

__all__ = ["fuse_modules"]

_log = logging.getLogger(__name__)

Part = RmsNorm | GatedMlp | Attention | DecoderLayer


def fuse_modules(model: nn.Module, ops: FusedOps) -> Callable[[], None] | None:
    """Let `ops` compute what it can of a loaded model with attention attached (`module.inflight`).

    Returns:
        A function that restores the modules' forward, or None if nothing was recognised.
    """
    fused: list[nn.Module] = []
    reasons: set[str] = set()
    _fuse(model, ops, fused, reasons)
    if reasons:
        _log.info("%s runs partly through transformers: %s", type(model).__name__, "; ".join(sorted(reasons)))

    def undo() -> None:
        for module in fused:
            del module.forward

    return undo if fused else None


def _fuse(module: nn.Module, ops: FusedOps, fused: list[nn.Module], reasons: set[str]) -> None:
    """Replace the forward of `module` or, if it is not recognised, those of its descendants.

    Args:
        fused: receives the modules that were replaced.
        reasons: receives why attention and decoder layers were not.
    """
    for recognise in (decoder_layer, attention, gated_mlp, rms_norm):
        try:
            part: Part = recognise(module)
            check(module, part, ops)
            _merge(part)
        except NotRecognised as reason:
            if recognise is _expected(module):
                reasons.add(str(reason))
            continue
        module.forward = part.as_forward(ops)
        fused.append(module)
        return
    for child in module.children():
        _fuse(child, ops, fused, reasons)


def _expected(module: nn.Module) -> Callable[..., Part] | None:
    """What a module with paged attention in it should be recognised as."""
    if hasattr(module, "inflight"):
        return attention
    return decoder_layer if any(hasattr(child, "inflight") for child in module.children()) else None


def _merge(part: Part) -> None:
    """Merge the projections of a part, so that it takes few launches."""
    if isinstance(part, DecoderLayer):
        if part.residual_factor != 1.0:
            raise NotRecognised("the decoder layers have a residual multiplier")
        _merge(part.attention)
        _merge(part.mlp)
    elif isinstance(part, Attention):
        part.qkv.merge()
    elif isinstance(part, GatedMlp):
        part.gate_up.merge()
