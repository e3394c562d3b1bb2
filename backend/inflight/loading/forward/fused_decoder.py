"""A transformers model's forward pass by `FusedOps`: the whole decoder, or module by module, in place.

On a GPU a decode step of an eager model is limited by the host: some twenty-five launches per layer, most of them for
norms, rotary embedding and gates.  Here a layer of the llama family takes ten:

    add + norm | merged query, key, value | norms of heads, rotary, KV write | attend, reduce | output
    add + norm | merged gate, up | silu and mul | down

The operation that computes the input of layers in fp8 also quantizes it; before the output projection that takes one
launch more.
The last sum of a layer joins the first norm of the next.  cos and sin come from a table by position.  Where not all
layers are recognised (`recognise/modules.py`), recognised ones take one launch more, and others are unchanged.
Merged weights take no extra memory: the modules' parameters become views of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from inflight.loading.recognise.decoder import Decoder, decoder_of
from inflight.loading.recognise.modules import (
    Attention,
    DecoderLayer,
    Forward,
    GatedMlp,
    NotRecognised,
    Projection,
    RmsNorm,
    attention,
    check,
    decoder_layer,
    gated_mlp,
    rms_norm,
    rotary,
)
from inflight.ops.base import Angles, FusedOps

__all__ = ["FusedDecoder", "fuse_modules", "projections_of"]

_log = logging.getLogger(__name__)

Part = RmsNorm | GatedMlp | Attention | DecoderLayer

_TABLE_CHUNK = 4096  # positions whose cos and sin are computed at once, in float32


class FusedDecoder:
    """The forward pass of a recognised base model, called like transformers' in a forward context.

    Args:
        num_positions: positions that requests can have.
    """

    def __init__(self, decoder: Decoder, ops: FusedOps, num_positions: int) -> None:
        self.decoder = decoder
        self.ops = ops
        self.table = _angle_table(decoder, num_positions)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> BaseModelOutputWithPast:
        """input_ids, position_ids int64 [1, T] -> last_hidden_state [1, T, H]."""
        decoder, ops = self.decoder, self.ops
        x = decoder.embed(input_ids[0])
        angles = self._angles(x, position_ids)
        layers, last = decoder.layers, decoder.layers[-1]
        normed = layers[0].input_norm(x, ops, layers[0].attention.qkv.takes_quantized)
        for layer, following in pairwise(layers):
            out, quantized = layer(normed, x, angles, ops), following.attention.qkv.takes_quantized
            normed = following.input_norm.of_sum(out, x, layer.residual_factor, ops, quantized)
        norm, out = decoder.final_norm, last(normed, x, angles, ops)
        hidden = cast(Tensor, norm.of_sum(out, x, last.residual_factor, ops))
        return BaseModelOutputWithPast(last_hidden_state=hidden[None])  # type: ignore[arg-type]

    def _angles(self, x: Tensor, position_ids: Tensor) -> Angles:
        if self.table is None:
            cos, sin = self.decoder.rotary_embedding(x, position_ids)
            return Angles(cos[0], sin[0], cos.shape[-1])
        cos, sin = self.table
        return Angles(cos, sin, 2 * cos.shape[-1], position_ids[0])


@dataclass(frozen=True)
class _FusedModule:
    """In place of a module's forward."""

    part: Part
    forward: Forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


@torch.no_grad()
def _angle_table(decoder: Decoder, num_positions: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin of each position, [num_positions, R / 2] in the model's dtype, as the rotary embedding computes them.

    At 131,072 positions, R = 128 and 16 bits, 32 MiB.  None if it depends on more than the position.
    """
    module, weight = decoder.rotary_embedding, decoder.embedding.weight
    try:
        rotary(module)
    except NotRecognised:
        return None
    # A request for a vector computes the token at the last position.  In a model's own rotary embedding a call with the
    # longest sequence can change the angles of all positions: so it is called alone, and first.
    positions = torch.arange(num_positions, device=weight.device)[None]
    last, others = positions[:, -1:], positions[:, :-1]
    alone = module(weight[:1], last)
    parts = [module(weight[:1], part) for part in others.split(_TABLE_CHUNK, dim=1) if part.numel()] + [alone]
    if not all(torch.equal(*table.chunk(2, dim=-1)) for part in parts for table in part):
        return None
    cos, sin = (torch.cat([table[0].chunk(2, dim=-1)[0] for table in tables]) for tables in zip(*parts))
    return cos, sin


def fuse_modules(model: nn.Module, ops: FusedOps, num_positions: int) -> Callable[[], None] | None:
    """Let `ops` compute what it can of a loaded model with attention attached (`module.inflight`).

    Args:
        num_positions: positions that requests can have.

    Returns:
        A function that restores the modules' forward, or None if nothing was recognised.
    """
    fused: list[nn.Module] = []
    reasons: set[str] = set()
    try:
        _fuse_decoder(model, ops, num_positions, fused)
    except NotRecognised as reason:
        _fuse(model, ops, fused, reasons)
        reasons = reasons or {str(reason)}
    if reasons:
        _log.info("%s runs partly through transformers: %s", type(model).__name__, "; ".join(sorted(reasons)))

    def undo() -> None:
        for module in fused:
            del module.forward

    return undo if fused else None


def _fuse_decoder(model: nn.Module, ops: FusedOps, num_positions: int, fused: list[nn.Module]) -> None:
    """Replace the forward of the base model.

    Raises:
        NotRecognised: some of its modules are something else.
    """
    decoder = decoder_of(model, ops)
    for layer in decoder.layers:
        _merge(layer)
    decoder.base.forward = FusedDecoder(decoder, ops, num_positions)
    fused.append(decoder.base)


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
        module.forward = _FusedModule(part, part.as_forward(ops))
        fused.append(module)
        return
    for child in module.children():
        _fuse(child, ops, fused, reasons)


def _expected(module: nn.Module) -> Callable[..., Part] | None:
    """The recogniser that should accept a module with paged attention in it; None if there is none."""
    if hasattr(module, "inflight"):
        return attention
    return decoder_layer if any(hasattr(child, "inflight") for child in module.children()) else None


def _merge(part: Part) -> None:
    """Merge the projections of a part, so that it takes few launches."""
    if isinstance(part, DecoderLayer):
        _merge(part.attention)
        _merge(part.mlp)
    elif isinstance(part, Attention):
        part.qkv.merge()
    elif isinstance(part, GatedMlp):
        part.gate_up.merge()


def projections_of(model: nn.Module) -> list[Projection]:
    """The products of several layers at once in a model that `fuse_modules` has changed."""
    found: list[Projection] = []
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, FusedDecoder):
            for layer in forward.decoder.layers:
                found += _projections(layer)
        elif isinstance(forward, _FusedModule):
            found += _projections(forward.part)
    return found


def _projections(part: Part) -> Iterator[Projection]:
    if isinstance(part, DecoderLayer):
        yield from _projections(part.attention)
        yield from _projections(part.mlp)
    elif isinstance(part, Attention):
        yield part.qkv
    elif isinstance(part, GatedMlp):
        yield part.gate_up
