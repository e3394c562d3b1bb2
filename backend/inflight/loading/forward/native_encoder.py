"""The layers of BERT and its relatives by the native kernel, in float32: `cpu_encoder.cpp`.

Embeddings, poolers and heads stay transformers' own modules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from inflight.attention.base import LayerSpec, current_batch
from inflight.kernels.cpu.cpu_encoder import EncoderLayerTables, EncoderTables, encode
from inflight.kernels.cpu.cpu_linear import PackedWeight
from inflight.kernels.cpu.library import unavailable
from inflight.loading.forward.packed_linear import drop_weights

__all__ = ["attach_native_encoder"]

# Layers like those of BERT.  Other kinds have modules of the same names, with rotary embeddings.
_LIKE_BERT = frozenset({"bert", "camembert", "electra", "roberta", "xlm-roberta"})
_log = logging.getLogger(__name__)
_FEW = 0.5  # of the tokens: the last layer computes them apart
_GELU = "GELUActivation"  # by the normal distribution; other kinds have other classes


@dataclass(frozen=True)
class _Layer:
    """The modules of a layer."""

    qkv: Sequence[Any]
    output: Any
    up: Any
    down: Any
    norms: Sequence[Any]
    activation: nn.Module

    @property
    def linears(self) -> list[Any]:
        return [*self.qkv, self.output, self.up, self.down]


def attach_native_encoder(
    base: Any, specs: Sequence[LayerSpec], rows_read: Callable[[], Tensor]
) -> Callable[[], None] | None:
    """Let `base`, which is on a CPU with attention attached, compute its layers natively.

    The layers' weights are packed, and freed.

    Args:
        rows_read: int64 [N], ascending: the tokens of the step whose last hidden states are read.

    Returns:
        A function that restores everything, or None if the kernel cannot compute this model; the log says why.
    """
    module, layers = _layers_of(base)
    obstacle = _obstacle(base.config.model_type, layers, specs) or unavailable()
    if obstacle is not None:
        _log.info("%s runs on transformers' layers: %s", type(base).__name__, obstacle)
        return None
    undone: list[Callable[[], None]] = []

    def pack(*linears: Any) -> PackedWeight:
        packed = PackedWeight([linear.weight for linear in linears], [linear.bias for linear in linears])
        undone.append(drop_weights(list(linears), packed, set()))
        return packed

    tables = EncoderTables(
        [_tables(layer, pack) for layer in layers], specs[0].num_heads, specs[0].scaling, layers[0].norms[0].eps
    )

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        """hidden_states float32 [1, T, H], of the embeddings, which nothing else reads: replaced in place."""
        hidden = hidden_states[0].contiguous()
        read = rows_read()
        few = 0 < len(read) <= len(hidden) * _FEW
        encode(tables, current_batch().query_start_loc, hidden, read if few else None)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden[None])  # type: ignore[arg-type]

    module.forward = forward

    def undo() -> None:
        del module.forward
        for restore in undone:
            restore()

    return undo


def _layers_of(base: Any) -> tuple[Any, list[_Layer]]:
    """The module that runs all layers, and their modules; none: not such a model."""
    kind = base.config.model_type
    if kind in _LIKE_BERT:
        return base.encoder, [_like_bert(layer) for layer in base.encoder.layer]
    if kind == "distilbert":
        return base.transformer, [_like_distilbert(layer) for layer in base.transformer.layer]
    return None, []


def _like_bert(layer: Any) -> _Layer:
    attention, middle, output = layer.attention, layer.intermediate, layer.output
    return _Layer(
        (attention.self.query, attention.self.key, attention.self.value),
        attention.output.dense,
        middle.dense,
        output.dense,
        (attention.output.LayerNorm, output.LayerNorm),
        middle.intermediate_act_fn,
    )


def _like_distilbert(layer: Any) -> _Layer:
    attention, mlp = layer.attention, layer.ffn
    return _Layer(
        (attention.q_lin, attention.k_lin, attention.v_lin),
        attention.out_lin,
        mlp.lin1,
        mlp.lin2,
        (layer.sa_layer_norm, layer.output_layer_norm),
        mlp.activation,
    )


def _obstacle(kind: str, layers: Sequence[_Layer], specs: Sequence[LayerSpec]) -> str | None:
    """Why the kernel cannot compute these layers, if it cannot."""
    if not layers:
        return f"the native ones are not for {kind!r}"
    if len(layers) != len(specs):
        return f"{len(layers)} layers, and {len(specs)} with attention"
    if len({norm.eps for layer in layers for norm in layer.norms}) > 1 or len({spec.scaling for spec in specs}) > 1:
        return "they differ in the eps of their norms, or in the scaling of attention"
    return next(filter(None, map(_obstacle_of, layers, specs)), None)


def _obstacle_of(layer: _Layer, spec: LayerSpec) -> str | None:
    size = layer.output.in_features
    if not all(type(linear) is nn.Linear for linear in layer.linears):
        return "not all projections are torch's linear layers"
    if (dtype := layer.output.weight.dtype) != torch.float32 or len({x.weight.dtype for x in layer.linears}) > 1:
        return f"the native ones compute in float32, and dtype is {dtype}"
    if type(layer.activation).__name__ != _GELU:
        return f"the activation is {type(layer.activation).__name__}, not {_GELU}"
    if spec.key_head_size % 8:
        return f"a head has {spec.key_head_size} features, which is no multiple of 8"
    fits = (
        all(linear.in_features == linear.out_features == size for linear in (*layer.qkv, layer.output))
        and (layer.up.in_features, layer.up.out_features) == (size, layer.down.in_features)
        and layer.down.out_features == size
        and spec.sliding_window is None
        and spec.num_kv_heads * spec.key_head_size == size
    )
    return None if fits else "their shapes are others than those of BERT"


def _tables(layer: _Layer, pack: Callable[..., PackedWeight]) -> EncoderLayerTables:
    return EncoderLayerTables(
        qkv=pack(*layer.qkv),
        output=pack(layer.output),
        up=pack(layer.up),
        down=pack(layer.down),
        norms=[tensor.data for norm in layer.norms for tensor in (norm.weight, norm.bias)],
    )
