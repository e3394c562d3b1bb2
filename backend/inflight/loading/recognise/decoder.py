"""Whether a whole model is an embedding, decoder layers of the llama family and a norm, with a head behind them.

Its parts are recognised one by one (`recognition.py`).  That the model computes just these, in order, is checked with
substitutes for the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inflight.loading.recognise.modules import (
    DecoderLayer,
    Forward,
    NotRecognised,
    RmsNorm,
    check,
    children_of,
    decoder_layer,
    rms_norm,
    same,
)
from inflight.ops.base import FusedOps
from inflight.ops.reference_ops import ReferenceOps

__all__ = ["Decoder", "decoder_of"]


@dataclass(frozen=True)
class Decoder:
    """norm(layers(embedding(tokens) * embedding_factor)), then head * logits_factor.

    Attributes:
        base: the module that computes all but the head.
        rotary_embedding: gives the layers their angles: (x, position_ids [1, T]) -> cos, sin [1, T, R].
    """

    base: Any
    embedding: nn.Embedding
    layers: list[DecoderLayer]
    final_norm: RmsNorm
    rotary_embedding: Any
    head: Any
    embedding_factor: float
    logits_factor: float

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> a new [T, H]."""
        x = self.embedding(token_ids)
        return x if self.embedding_factor == 1.0 else x * self.embedding_factor


def decoder_of(model: Any, ops: FusedOps | None = None) -> Decoder:
    """Recognise and check the decoder of a model with attention attached, computed by `ops` (default: `ReferenceOps`).

    The head is neither checked nor is its factor: the check at load compares logits.

    Raises:
        NotRecognised: it is something else.
    """
    base, head = _children(model, "model", "lm_head")
    embedding, layers, norm, rotary_embedding = _children(base, "embed_tokens", "layers", "norm", "rotary_emb")
    if not isinstance(embedding, nn.Embedding) or not isinstance(layers, nn.ModuleList):
        raise NotRecognised(f"{type(base).__name__} has other modules than an embedding and a list of layers")
    found = Decoder(
        base,
        embedding,
        [decoder_layer(layer) for layer in layers],
        rms_norm(norm),
        rotary_embedding,
        head,
        embedding_factor=float(getattr(base, "embedding_multiplier", 1.0)),
        logits_factor=1.0 / float(getattr(model.config, "logits_scaling", 1.0)),
    )
    checked = set()
    for layer, part in zip(layers, found.layers):
        kind = type(layer), part.attention.rotary, part.attention.layer.spec
        if kind not in checked:  # one layer of a kind: the others read as many weights and compute the same
            check(layer, part, ops)
            checked.add(kind)
    _check_order(found, list(layers))
    return found


@torch.no_grad()
def _check_order(found: Decoder, layers: list[nn.Module]) -> None:
    """Run the base model with layers that only rotate the elements of their input by one place."""
    device = found.embedding.weight.device
    token_ids, positions = torch.tensor([[0, 2, 1]], device=device), torch.tensor([[3, 0, 9]], device=device)
    x = found.embed(token_ids[0])
    angles = found.rotary_embedding(x, positions)
    seen: list[tuple[int, Any]] = []

    def stand_in(index: int) -> Forward:
        def forward(hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Tensor:
            seen.append((index, position_embeddings))
            return hidden_states.roll(1, -1)

        return forward

    name = type(found.base).__name__
    for index, layer in enumerate(layers):
        layer.forward = stand_in(index)
    try:
        out = found.base(input_ids=token_ids, position_ids=positions, use_cache=False).last_hidden_state[0]
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise NotRecognised(f"{name} cannot be called as a decoder: {error}") from error
    finally:
        for layer in layers:
            del layer.forward
    if [index for index, _ in seen] != list(range(len(layers))):
        raise NotRecognised(f"{name} does not call its layers once each, in order")
    if not all(isinstance(given, tuple) and all(map(torch.equal, given, angles)) for _, given in seen):
        raise NotRecognised(f"{name} gives its layers other angles than its rotary embedding's")
    norm = found.final_norm.as_forward(ReferenceOps())
    if not same(out, norm(x.roll(len(layers), -1))):
        raise NotRecognised(f"{name} computes something else than an embedding, layers and a norm")


def _children(module: nn.Module, *names: str) -> list[Any]:
    """The children of these names; there must be no others."""
    children = children_of(module)
    if set(children) != set(names):
        raise NotRecognised(
            f"{type(module).__name__} has {', '.join(sorted(children))}, not {', '.join(sorted(names))}"
        )
    return [children[name] for name in names]
