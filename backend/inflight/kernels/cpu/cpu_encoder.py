"""The layers of an encoder like BERT as one native call: `cpu_encoder.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.kernels.cpu.cpu_linear import LinearStruct, PackedWeight
from inflight.kernels.cpu.library import library

__all__ = ["EncoderLayerTables", "EncoderTables", "encode"]


class _EncoderLayer(ctypes.Structure):
    """`EncoderLayer` of cpu_encoder.cpp."""

    _fields_ = [
        ("qkv", LinearStruct),
        ("output", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
        ("attention_norm", c_void_p),
        ("attention_shift", c_void_p),
        ("norm", c_void_p),
        ("shift", c_void_p),
    ]


class _Encoder(ctypes.Structure):
    """`Encoder` of cpu_encoder.cpp."""

    _fields_ = [
        ("layers", POINTER(_EncoderLayer)),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("num_heads", c_int64),
        ("scaling", c_float),
        ("eps", c_float),
    ]


@dataclass
class EncoderLayerTables:
    """One layer: attention with merged projections, layer norm, MLP with GELU, layer norm.

    Attributes:
        qkv, output, up, down: packed projections, in float32.
        norms: weight and bias of the norm behind attention, then of the one behind the MLP; float32 [hidden_size].
    """

    qkv: PackedWeight
    output: PackedWeight
    up: PackedWeight
    down: PackedWeight
    norms: Sequence[Tensor]


@dataclass
class EncoderTables:
    """Everything that a pass reads besides the batch.  Owns the tensors whose addresses the kernel has.

    Attributes:
        scaling: of attention.
        eps: of all norms.
        address: of the description that the kernel reads.
    """

    layers: list[EncoderLayerTables]
    num_heads: int
    scaling: float
    eps: float

    def __post_init__(self) -> None:
        layers = (_EncoderLayer * len(self.layers))()
        for struct, layer in zip(layers, self.layers):
            struct.qkv, struct.output = layer.qkv.struct, layer.output.struct
            struct.up, struct.down = layer.up.struct, layer.down.struct
            for name, tensor in zip(("attention_norm", "attention_shift", "norm", "shift"), layer.norms):
                setattr(struct, name, tensor.data_ptr())
        self._struct = _Encoder(
            layers=layers,
            num_layers=len(layers),
            hidden_size=self.layers[0].qkv.in_features,
            num_heads=self.num_heads,
            scaling=self.scaling,
            eps=self.eps,
        )
        self.address = ctypes.addressof(self._struct)


def encode(tables: EncoderTables, starts: Tensor, hidden: Tensor, read: Tensor | None = None) -> None:
    """Run all layers over whole prompts.

    Args:
        starts: int32 [R + 1]; where each prompt begins among the tokens, and the number of tokens.
        hidden: float32 [T, H], contiguous: the embeddings, replaced by the hidden states.
        read: int64 [N], contiguous, ascending: rows of `hidden` that are read afterwards, others are undefined; None:
            all.
    """
    rows = (None, 0) if read is None else (read.data_ptr(), len(read))
    library().inflight_ops_encode(
        tables.address, starts.data_ptr(), len(starts) - 1, hidden.data_ptr(), *rows, torch.get_num_threads()
    )
