"""A decoder's forward pass as one native call: `cpu_decoder.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inflight.kernels.cpu.cpu_attention import CpuBatch
from inflight.kernels.cpu.cpu_linear import LinearStruct, PackedWeight, address_of
from inflight.kernels.cpu.library import DTYPE_CODES, library

__all__ = ["DecoderTables", "LayerTables", "StepAdapters", "forward"]


class _DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of cpu_ops.h."""

    _fields_ = [
        ("qkv", LinearStruct),
        ("output", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("attention", c_void_p),
        ("rotary", c_int32),
    ]


class _Decoder(ctypes.Structure):
    """`Decoder` of cpu_ops.h."""

    _fields_ = [
        ("layers", POINTER(_DecoderLayer)),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("embedding", c_void_p),
        ("dtype", c_int32),
        ("rotary_size", c_int32),
        ("inverse_frequencies", c_void_p),
        ("final_norm", c_void_p),
        ("head", LinearStruct),
        ("rotary_scaling", c_float),
        ("eps", c_float),
        ("embedding_factor", c_float),
        ("residual_factor", c_float),
        ("logits_factor", c_float),
    ]


@dataclass
class LayerTables:
    """One decoder layer: RMS norm, attention with merged projections, RMS norm, gated MLP.

    Attributes:
        qkv, output, gate_up, down: merged and packed projections.
        modules: paths in the model of the linear layers of the projections, in this order.
        input_norm, post_norm: float32 [hidden_size].
        query_norm, key_norm: float32 [head size], applied to each head; or None.
        attention: address of the layer's description for the attention kernel, see `CpuKVCache`.
        rotary: whether query and key are rotated.
    """

    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    input_norm: Tensor
    post_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention: int
    rotary: bool
    modules: list[str] = field(default_factory=list)

    @property
    def projections(self) -> list[PackedWeight]:
        """In the order of `Projection` in cpu_lora.h."""
        return [self.qkv, self.output, self.gate_up, self.down]


@dataclass
class DecoderTables:
    """Everything that a forward pass reads besides the batch.  Owns the tensors whose addresses the kernel has.

    Attributes:
        embedding: [vocab_size, hidden_size].
        inverse_frequencies: float32 [R / 2]; R elements of each head are rotated.
        rotary_scaling: factor applied to cos and sin.
        final_norm: float32 [hidden_size].
        eps: of all norms.
        embedding_factor, residual_factor, logits_factor: multipliers that some families have, else 1.
        address: of the description that the kernel reads.
    """

    layers: list[LayerTables]
    embedding: Tensor
    inverse_frequencies: Tensor
    rotary_scaling: float
    final_norm: Tensor
    head: PackedWeight
    eps: float
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logits_factor: float = 1.0

    def __post_init__(self) -> None:
        layers = (_DecoderLayer * len(self.layers))()
        for struct, layer in zip(layers, self.layers):
            struct.qkv, struct.output = layer.qkv.struct, layer.output.struct
            struct.gate_up, struct.down = layer.gate_up.struct, layer.down.struct
            struct.input_norm, struct.post_norm = address_of(layer.input_norm), address_of(layer.post_norm)
            struct.query_norm, struct.key_norm = address_of(layer.query_norm), address_of(layer.key_norm)
            struct.attention, struct.rotary = layer.attention, int(layer.rotary)
        self._struct = _Decoder(
            layers=layers,
            num_layers=len(layers),
            hidden_size=self.embedding.shape[1],
            embedding=self.embedding.data_ptr(),
            dtype=DTYPE_CODES[self.embedding.dtype],
            rotary_size=2 * len(self.inverse_frequencies),
            inverse_frequencies=self.inverse_frequencies.data_ptr(),
            final_norm=self.final_norm.data_ptr(),
            head=self.head.struct,
            rotary_scaling=self.rotary_scaling,
            eps=self.eps,
            embedding_factor=self.embedding_factor,
            residual_factor=self.residual_factor,
            logits_factor=self.logits_factor,
        )
        self.address = ctypes.addressof(self._struct)


@dataclass(frozen=True)
class StepAdapters:
    """The adapters of a step's tokens.

    Attributes:
        of_token: int64 [T]: `PackedAdapter.address`, or 0.
        inner: the largest of `PackedAdapter.inner`.
        owners: of what lies at the addresses.
    """

    of_token: Tensor
    inner: int
    owners: Sequence[object]


def forward(
    tables: DecoderTables,
    batch: CpuBatch,
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    hidden_indices: Tensor,
    adapters: StepAdapters | None = None,
) -> tuple[Tensor, Tensor]:
    """One ragged forward pass over T tokens; writes their keys and values to the pool.

    Args:
        batch: the step's batch as prepared by `CpuAttention`.
        input_ids, positions: int64 [T], contiguous.
        logits_indices: int64 [K], the tokens whose logits are computed.
        hidden_indices: int64 [P], the tokens whose hidden states after the final norm are returned.
        adapters: of the tokens; None: none has one.

    Returns:
        float32 [K, vocab_size] and [P, hidden_size].
    """
    logits = torch.empty(len(logits_indices), tables.head.out_features)
    hidden = torch.empty(len(hidden_indices), tables.embedding.shape[1])
    library().inflight_ops_forward(
        tables.address,
        batch.address,
        input_ids.data_ptr(),
        positions.data_ptr(),
        logits_indices.data_ptr(),
        len(logits_indices),
        logits.data_ptr(),
        hidden_indices.data_ptr(),
        len(hidden_indices),
        hidden.data_ptr(),
        None if adapters is None else adapters.of_token.data_ptr(),
        0 if adapters is None else adapters.inner,
        torch.get_num_threads(),
    )
    return logits, hidden
