"""The native CPU decoder: packed weights, single products, and a forward pass as one call.

`cpu_ops.cpp`, called through ctypes; it is compiled into the library of the attention kernel
(`kernels/cpu/build.py`) and runs the same instruction set on the same threads.  A token's result is
the same to the last bit whatever the batch and the number of threads; it depends on the
instruction set.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.kernels.cpu.attention import allocate
from inflight.kernels.cpu.attention import unavailable as attention_unavailable
from inflight.kernels.cpu.build import LIBRARY

__all__ = [
    "DecoderTables",
    "LayerTables",
    "PackedWeight",
    "discard",
    "forward",
    "linear",
    "unavailable",
    "unsupported_weight",
]

_ABI = 2  # of cpu_ops.cpp
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT8 = 3
_ROWS = 4096  # quantized at once, in float32


class _Linear(ctypes.Structure):
    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("dtype", c_int32),
        ("gated", c_int32),
    ]


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        ("qkv", _Linear),
        ("output", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("attention", c_void_p),
        ("rotary", c_int32),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(_DecoderLayer)),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("embedding", c_void_p),
        ("dtype", c_int32),
        ("rotary_size", c_int32),
        ("inverse_frequencies", c_void_p),
        ("final_norm", c_void_p),
        ("head", _Linear),
        ("rotary_scaling", c_float),
        ("eps", c_float),
        ("embedding_factor", c_float),
        ("residual_factor", c_float),
        ("logits_factor", c_float),
    ]


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    missing = attention_unavailable()
    if missing is not None:
        return missing
    library = ctypes.CDLL(str(LIBRARY))
    if not hasattr(library, "inflight_ops_abi") or library.inflight_ops_abi() != _ABI:
        return "a kernel compiled from this version's source: run `python -m inflight.kernels.cpu.build`"
    library.inflight_ops_packed_bytes.argtypes = [c_void_p]
    library.inflight_ops_packed_bytes.restype = c_int64
    library.inflight_ops_pack.argtypes = [c_void_p, c_void_p, c_int32]
    library.inflight_ops_pack.restype = None
    library.inflight_ops_unpack.argtypes = [c_void_p, c_void_p, c_int32]
    library.inflight_ops_unpack.restype = None
    library.inflight_ops_discard.argtypes = [c_void_p, c_int64]
    library.inflight_ops_discard.restype = None
    library.inflight_ops_linear.argtypes = [c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_int32]
    library.inflight_ops_linear.restype = None
    library.inflight_ops_forward.argtypes = [*[c_void_p] * 5, c_int64, c_void_p, c_int32]
    library.inflight_ops_forward.restype = None
    return library


def _library() -> ctypes.CDLL:
    library = _load()
    if isinstance(library, str):
        raise RuntimeError(f"the native CPU decoder lacks {library}")
    return library


def unavailable() -> str | None:
    """What is missing (and what to do) where the decoder cannot run at all."""
    library = _load()
    return library if isinstance(library, str) else None


def unsupported_weight(weight: Tensor) -> str | None:
    """Why `weight` [out_features, in_features] cannot be packed, or None when it can."""
    if weight.dtype not in _DTYPES:
        return f"dtype {weight.dtype}"
    if weight.dim() != 2 or not weight.is_cpu:
        return f"a weight of shape {list(weight.shape)} on {weight.device}"
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2:
        return f"{weight.shape[1]} input features in bfloat16 (an odd number)"
    return None


class PackedWeight:
    """A linear layer's weights in the order in which the kernel reads them.

    Args:
        weights: [n_i, in_features] each, of one dtype; they become one layer of sum(n_i) features.
        biases: [n_i] or None of each.
        gated: the weights are a gate's and as many of the other operand: results are silu(gate) * other.
        int8: hold them in eight bits with a scale for every output feature (W8A8: the input is quantized row by
            row); where in_features is no multiple of 4, they stay as they are.

    Raises:
        ValueError: see `unsupported_weight`.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (),
        gated: bool = False,
        int8: bool = False,
    ) -> None:
        for weight in weights:
            reason = unsupported_weight(weight)
            if reason is not None:
                raise ValueError(f"cannot pack {reason}: use torch's own linear")
        self.dtype = weights[0].dtype
        self.sizes = [len(weight) for weight in weights]
        self.in_features = weights[0].shape[1]
        self.out_features = sum(self.sizes)
        self.num_results = self.out_features // 2 if gated else self.out_features
        self.is_int8 = int8 and self.in_features % 4 == 0
        self.bias = _merged_bias(biases, self.sizes)
        plain = (weights[0] if len(weights) == 1 else torch.cat(list(weights))).contiguous()
        self.scales = self.offsets = None
        if self.is_int8:
            plain, self.scales, self.offsets = _quantized(plain)
        self.struct = _Linear(
            bias=_address(self.bias),
            scales=_address(self.scales),
            offsets=_address(self.offsets),
            in_features=self.in_features,
            out_features=self.out_features,
            dtype=_INT8 if self.is_int8 else _DTYPES[self.dtype],
            gated=int(gated),
        )
        self.address = ctypes.addressof(self.struct)
        size = _library().inflight_ops_packed_bytes(self.address) // plain.itemsize
        self.panels = allocate(size, dtype=plain.dtype)
        self.struct.panels = self.panels.data_ptr()
        _library().inflight_ops_pack(self.address, plain.data_ptr(), torch.get_num_threads())

    def unpack(self) -> list[Tensor]:
        """The weights as they were given; from int8, as they are now."""
        plain = torch.empty(self.out_features, self.in_features, dtype=self.panels.dtype)
        _library().inflight_ops_unpack(self.address, plain.data_ptr(), torch.get_num_threads())
        if self.scales is not None:
            plain = (plain * self.scales[:, None]).to(self.dtype)
        return [part.clone() for part in plain.split(self.sizes)] if len(self.sizes) > 1 else [plain]


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 [N, K] with float32 scales [N], the nearest to `weight`; and 128 times its sums, int32 [N]."""
    rows, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for start in range(0, len(weight), _ROWS):
        part = weight[start : start + _ROWS].float()
        scale = part.abs().amax(1) / 127
        scales[start : start + _ROWS] = scale
        rows[start : start + _ROWS] = (part / scale.clamp_min(1e-30)[:, None]).round_()
    return rows, scales, rows.sum(1, dtype=torch.int32) * 128


def discard(tensor: Tensor) -> None:
    """Give the memory of a contiguous tensor that nobody reads again back to the system, mapped file or not."""
    _library().inflight_ops_discard(tensor.data_ptr(), tensor.nbytes)


def _merged_bias(biases: Sequence[Tensor | None], sizes: list[int]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat([torch.zeros(n) if bias is None else bias.float() for bias, n in zip(biases, sizes)])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [..., in_features] times the weight, plus its bias: [..., results], of x's dtype."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], weight.num_results)
    rows = x.numel() // weight.in_features
    _library().inflight_ops_linear(
        weight.address, x.data_ptr(), rows, _DTYPES[x.dtype], out.data_ptr(), torch.get_num_threads()
    )
    return out


@dataclass
class LayerTables:
    """One decoder layer: RMS norm, attention with merged projections, RMS norm, gated MLP.

    Attributes:
        qkv, output, gate_up, down: merged and packed projections.
        input_norm, post_norm: float32 [hidden_size].
        query_norm, key_norm: float32 [head size] of norms over each head, or None.
        attention: address of the CPU attention kernel's description of the layer.
        rotary: whether positions are applied to query and key.
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


@dataclass
class DecoderTables:
    """All that a forward pass reads beside the batch; holds the tensors that the kernel has addresses of.

    Attributes:
        embedding: [vocab_size, hidden_size].
        inverse_frequencies: float32 [R / 2]; R elements of a head are rotated.
        rotary_scaling: factor on cos and sin.
        final_norm: float32 [hidden_size].
        eps: of all norms.
        embedding_factor, residual_factor, logits_factor: multipliers where a family has them, else 1.
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
            struct.input_norm, struct.post_norm = _address(layer.input_norm), _address(layer.post_norm)
            struct.query_norm, struct.key_norm = _address(layer.query_norm), _address(layer.key_norm)
            struct.attention, struct.rotary = layer.attention, int(layer.rotary)
        self._struct = _Decoder(
            layers=layers,
            num_layers=len(layers),
            hidden_size=self.embedding.shape[1],
            embedding=self.embedding.data_ptr(),
            dtype=_DTYPES[self.embedding.dtype],
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


def forward(tables: DecoderTables, batch: int, input_ids: Tensor, positions: Tensor, kept: Tensor) -> Tensor:
    """One ragged forward pass over T tokens; writes their keys and values to the pool.

    Args:
        batch: address of the attention kernel's description of the step.
        input_ids, positions: int64 [T], contiguous.
        kept: int64 [K], tokens whose logits are wanted.

    Returns:
        float32 [K, vocab_size].
    """
    logits = torch.empty(len(kept), tables.head.out_features)
    _library().inflight_ops_forward(
        tables.address,
        batch,
        input_ids.data_ptr(),
        positions.data_ptr(),
        kept.data_ptr(),
        len(kept),
        logits.data_ptr(),
        torch.get_num_threads(),
    )
    return logits
