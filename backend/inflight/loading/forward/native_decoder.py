"""The native CPU forward pass of a model: which decoders it can run, and their weights in its format.

The families around llama (llama, mistral, qwen2, qwen3, phi3, granite, smollm3 and similar ones) are one
computation with a few options.  A model is recognised by its modules (`decoder_recognition.py`), not by its name.
Whatever remains different (a multiplier) shows in the check at load, which compares logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from inflight.attention.base import LayerAttention, current_batch
from inflight.kernels.cpu import cpu_decoder as native
from inflight.kernels.cpu.cpu_attention import MAX_HEAD_SIZE, CpuAttention, CpuKVCache
from inflight.kernels.cpu.cpu_linear import PackedWeight, unsupported_weight
from inflight.kernels.cpu.library import unavailable
from inflight.kernels.cpu.weight_format import UNCHANGED, Formats
from inflight.loading.forward.packed_linear import drop_weights
from inflight.loading.quantization.coded_linear import CodedLinear, dequantise, packed_together, shared_weights
from inflight.loading.recognise.decoder import Decoder, decoder_of
from inflight.loading.recognise.modules import DecoderLayer, NotRecognised, RmsNorm, Rotary, linears_of, rotary
from inflight.ops.base import HeadNorms

__all__ = ["NativeDecoder", "native_decoder"]

_log = logging.getLogger(__name__)
_NO_TOKENS = torch.empty(0, dtype=torch.int64)


class NativeDecoder:
    """Called like the transformers model that it replaces, in a forward context of `CpuAttention`.

    Implements `ForwardPass`; its head runs with the decoder.

    Attributes:
        adapters: of the tokens of the next call; None: none has one.
    """

    yields_hidden = True
    max_rows = 256
    head: Callable[[Tensor], Tensor] | None = None

    def __init__(self, tables: native.DecoderTables, attention: list[LayerAttention]) -> None:
        self.adapters: native.StepAdapters | None = None
        self.tables = tables
        self.attention = attention  # owns the KV pool, whose address is in the tables
        self.dtype = tables.embedding.dtype

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor | int = 0,
        use_cache: bool = False,
        hidden_to_keep: Tensor = _NO_TOKENS,
    ) -> SimpleNamespace:
        """input_ids, position_ids int64 [1, T]; logits of the last n tokens (0: all) or of int64 [K].

        Args:
            hidden_to_keep: int64 [P]; tokens whose hidden states after the final norm are returned.

        Returns:
            `logits`, float32 [1, K, vocab_size], and `hidden`, float32 [P, hidden_size].
        """
        if isinstance(logits_to_keep, int):
            logits_to_keep = torch.arange(input_ids.shape[1])[-logits_to_keep:]
        tokens = input_ids[0], position_ids[0]
        logits, hidden = native.forward(
            self.tables, current_batch(), *tokens, logits_to_keep, hidden_to_keep, self.adapters
        )
        return SimpleNamespace(logits=logits[None], hidden=hidden)

    def run(
        self, input_ids: Tensor, position_ids: Tensor, keep: Tensor, asked: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Iterable[Tensor], Tensor]:
        rows = torch.cat([keep, asked]) if len(asked) else keep
        result = self(input_ids, position_ids, rows, hidden_to_keep=hidden)
        logits = result.logits[0]
        more = logits[len(keep) :].split(self.max_rows) if len(asked) else ()
        return logits[: len(keep)], more, result.hidden


def native_decoder(model: nn.Module, stored_as: Formats = UNCHANGED) -> tuple[NativeDecoder, Callable[[], None]] | str:
    """Make the native decoder of a loaded model with attention attached; it takes over the linear weights.

    Args:
        stored_as: their format.

    Returns:
        The decoder, and a function that gives the weights back to `model`; or why it cannot run the model.
    """
    if (missing := unavailable()) is not None:
        return missing
    try:
        decoder = decoder_of(model)
        angles = rotary(decoder.rotary_embedding)
        _expect_supported(decoder, angles)
    except NotRecognised as reason:
        return str(reason)
    return _pack(model, decoder, angles, stored_as)


def _expect_supported(decoder: Decoder, angles: Rotary) -> None:
    """Check the limits of the native forward pass.

    Raises:
        NotRecognised: the model exceeds one.
    """
    for layer in decoder.layers:
        backend, head_size = layer.attention.layer.backend, layer.attention.layer.spec.key_head_size
        if not isinstance(backend, CpuAttention):
            raise NotRecognised(f"the native forward pass requires attention_backend='cpu', not {backend.name!r}")
        if not 2 * len(angles.inverse_frequencies) <= head_size <= MAX_HEAD_SIZE:
            raise NotRecognised(f"head size {head_size} is smaller than its rotary embedding or above {MAX_HEAD_SIZE}")
    norms: list[RmsNorm | HeadNorms] = [decoder.final_norm]
    for layer in decoder.layers:
        norms += [layer.input_norm, layer.post_norm]
        norms += [layer.attention.norms] if layer.attention.norms is not None else []
    if len({norm.eps for norm in norms}) > 1:
        raise NotRecognised("its norms differ in eps")
    if len({layer.residual_factor for layer in decoder.layers}) > 1:
        raise NotRecognised("its layers differ in their residual multiplier")
    dtype = decoder.embedding.weight.dtype
    linears: list[Any] = [linear for layer in decoder.layers for linear in linears_of(layer)]
    for linear in [*linears, decoder.head]:
        if type(linear) not in (nn.Linear, CodedLinear):
            raise NotRecognised(f"{type(linear).__name__} is not a plain linear layer")
        if (linear.dtype if isinstance(linear, CodedLinear) else linear.weight.dtype) != dtype:
            raise NotRecognised("its weights have different dtypes")
        if type(linear) is nn.Linear and (reason := unsupported_weight(linear.weight)) is not None:
            raise NotRecognised(f"one of its linear layers has {reason}")
    widths = {decoder.embedding.embedding_dim, decoder.head.in_features, len(decoder.final_norm.weight)}
    if len(widths | {layer.attention.qkv.in_features for layer in decoder.layers}) > 1:
        raise NotRecognised("its embedding and layers differ in size")


def _pack(
    model: nn.Module, decoder: Decoder, angles: Rotary, stored_as: Formats
) -> tuple[NativeDecoder, Callable[[], None]]:
    undone: list[Callable[[], None]] = []
    shared = shared_weights(model)

    def encode(linears: Sequence[nn.Linear], gated: bool = False) -> PackedWeight:
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        stored = stored_as.head if linears[0] is decoder.head else stored_as.layers
        packed = PackedWeight(weights, biases, gated, stored)
        undone.append(drop_weights(list(linears), packed, shared))
        return packed

    def pack(*linears: nn.Module, gated: bool = False) -> PackedWeight:
        if all(isinstance(linear, nn.Linear) for linear in linears):
            return encode(cast(Sequence[nn.Linear], linears), gated)
        together = packed_together(linears, gated, encode)
        if together is None:
            _log.warning("a gate and its operand are stored in different codes: both are dequantised")
            plain = [dequantise(linear) if isinstance(linear, CodedLinear) else linear for linear in linears]
            return encode(cast(Sequence[nn.Linear], plain), gated)
        undone.append(together[1])
        return together[0]

    paths = {module: path for path, module in model.named_modules()}
    tables = native.DecoderTables(
        layers=[_layer_tables(layer, pack, paths) for layer in decoder.layers],
        embedding=decoder.embedding.weight.data.clone(),  # so that nothing refers to the mapped file
        inverse_frequencies=angles.inverse_frequencies,
        rotary_scaling=angles.scaling,
        final_norm=_floats(decoder.final_norm.weight),
        head=pack(decoder.head),
        eps=decoder.final_norm.eps,
        embedding_factor=decoder.embedding_factor,
        residual_factor=decoder.layers[0].residual_factor,
        logits_factor=decoder.logits_factor,
    )

    def undo() -> None:
        for restore in undone:
            restore()

    return NativeDecoder(tables, [layer.attention.layer for layer in decoder.layers]), undo


def _layer_tables(
    layer: DecoderLayer, pack: Callable[..., PackedWeight], paths: Mapping[nn.Module, str]
) -> native.LayerTables:
    attention, norms = layer.attention, layer.attention.norms
    assert isinstance(attention.layer.cache, CpuKVCache)
    return native.LayerTables(
        qkv=pack(*attention.qkv.linears),
        output=pack(attention.output),
        gate_up=pack(*layer.mlp.gate_up.linears, gated=True),
        down=pack(layer.mlp.down),
        input_norm=_floats(layer.input_norm.weight),
        post_norm=_floats(layer.post_norm.weight),
        query_norm=None if norms is None else _floats(norms.query_weight),
        key_norm=None if norms is None else _floats(norms.key_weight),
        attention=attention.layer.cache.address,
        rotary=attention.rotary,
        modules=[paths[linear] for linear in (*attention.qkv.linears, attention.output, *linears_of(layer.mlp))],
    )


def _floats(weight: Tensor) -> Tensor:
    return weight.to(torch.float32, copy=True)
