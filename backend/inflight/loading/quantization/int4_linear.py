"""Linear layers with weights in four bits on a GPU: those of a checkpoint in its own codes, or quantised at load.

Inputs stay in 16 bits.  `kernels/gpu/gpu_int4.py` computes products; `ops/int4.py` says what they mean.  Codes are
chosen on the host, by the function that chooses those of a CPU: they are the same on both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.kernels.cpu.weight_format import INT4, Codes4
from inflight.kernels.registry import no_int4, select_int4
from inflight.loading.load_errors import LoadError, in_one_line
from inflight.loading.quantization.fp8_linear import decoder_linears, replace_linears
from inflight.loading.quantization.stored_weight import Coded, StoredWeight, shortest
from inflight.ops.int4 import ZERO, Int4Ops, Int4Weight, span_of, tiled

__all__ = [
    "Int4Codes",
    "Int4Linear",
    "bytes_of",
    "fits",
    "fitting_linears",
    "quantised",
    "quantize_linears",
    "stays_in_codes",
    "unsupported",
]

_log = logging.getLogger(__name__)

_GROUP = Codes4.input_group
_DTYPES = (torch.bfloat16, torch.float16)
_TOLERANCE = 8  # of a product's relative error, in units of the dtype's rounding
_PARTS = ("codes", "scales", "offsets", "factors")


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `device` has no products with weights in four bits for inputs in `dtype`; None if it has."""
    if device.type != "cuda":
        return f"it needs a GPU, and the device is {device.type}"
    if dtype not in _DTYPES:
        return f"it needs dtype bfloat16 or float16, and the model's is {str(dtype).removeprefix('torch.')}"
    return no_int4()


def stays_in_codes(quantization: str | None, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a checkpoint's codes of four bits are kept, and not quantised once more by another scheme."""
    return quantization not in ("int8", "fp8") and unsupported(device, dtype) is None


def fits(num_inputs: int, group: int = _GROUP) -> bool:
    """Whether the kernel supports layers with so many inputs, and so many of them to a scale."""
    return num_inputs % group == 0 and span_of(num_inputs, group) is not None


def bytes_of(num_outputs: int, num_inputs: int) -> int:
    """Bytes of a quantised weight."""
    return num_outputs * (num_inputs // 2 + 2 * (num_inputs // _GROUP) + 8)


def quantised(weight: Tensor, importance: Tensor | None, device: torch.device) -> Int4Weight:
    """The weight in four bits, on `device`, that is nearest to a plain one [N, K] in float32, bfloat16 or float16.

    An output with a weight that is not finite has a factor that is not a number.

    Args:
        importance: see `WeightFormat.encode`.
    """
    codes, span = INT4.encode(weight.cpu().contiguous(), importance), span_of(weight.shape[1], _GROUP)
    assert isinstance(codes, Codes4) and span is not None
    scales, mins = (x.t().contiguous().to(device) for x in (codes.group_scales, codes.group_mins))
    factors = torch.stack((codes.scales, codes.mins)).to(device)
    return Int4Weight(tiled(codes.values.to(device), span), scales, mins, factors)


class Int4Linear(nn.Module):
    """`nn.Linear` with a weight in four bits.

    Attributes:
        codes, scales, offsets, factors: of `Int4Weight`.
        bias: [N], or None.
        order: int32 [K]: the weight's input k is input order[k] of the layer; None if that is k.
        dtype: of inputs and results.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    factors: Tensor | None
    bias: Tensor | None
    order: Tensor | None

    def __init__(
        self, weight: Int4Weight, bias: Tensor | None, order: Tensor | None, dtype: torch.dtype, ops: Int4Ops
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.num_outputs, weight.num_inputs
        self.dtype = dtype
        for name in _PARTS:
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("bias", bias)
        self.register_buffer("order", order)
        self._ops = ops
        ops.prepare(weight, dtype)

    @classmethod
    def quantized(cls, linear: nn.Linear, importance: Tensor | None, device: torch.device, ops: Int4Ops) -> Int4Linear:
        """The layer on `device`, its weight rounded; see `quantised`."""
        bias = None if linear.bias is None else linear.bias.data.to(device)
        return cls(quantised(linear.weight.data, importance, device), bias, None, linear.weight.dtype, ops)

    @classmethod
    def merged(cls, parts: Sequence[Int4Linear]) -> Int4Linear:
        """All layers in one product, results side by side; tensors of `parts` become views of the merged ones.

        Raises:
            ValueError: see `can_merge`.
        """
        first = parts[0]
        if not can_merge(parts):
            raise ValueError("the layers differ in dtype, codes, order or inputs, or in whether they have a bias")
        weight = Int4Weight(*(_concatenated(parts, name) for name in _PARTS))  # type: ignore[arg-type]
        return cls(weight, _concatenated(parts, "bias"), first.order, first.dtype, first._ops)

    @property
    def int4_weight(self) -> Int4Weight:
        return Int4Weight(self.codes, self.scales, self.offsets, self.factors)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N].  An x of another dtype than the layer's is multiplied in that dtype."""
        if self.order is not None:
            x = x.index_select(-1, self.order)
        if x.dtype != self.dtype:  # float32: the check at load asks for what the weights mean, without rounding
            return F.linear(x, self.int4_weight.dequantised(x.dtype), self.bias)
        out = self._ops.linear(x.reshape(-1, self.in_features), self.int4_weight, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        group = self.in_features // len(self.scales)
        return f"in_features={self.in_features}, out_features={self.out_features}, {group=}, dtype={self.dtype}"


def can_merge(parts: Sequence[Int4Linear]) -> bool:
    """Whether the layers can be one product: they read the same inputs, in the same order and groups."""
    first = parts[0]
    kinds = {(part.dtype, part.bias is None, part.order is None, part.codes.shape[::2]) for part in parts}
    kinds_of_groups = {(part.scales.dtype, len(part.scales), part.offsets is None) for part in parts}
    if len(kinds) > 1 or len(kinds_of_groups) > 1:
        return False
    return first.order is None or all(torch.equal(part.order, first.order) for part in parts)  # type: ignore[arg-type]


def _concatenated(parts: Sequence[Int4Linear], name: str) -> Tensor | None:
    """The parts' tensors of this name, side by side; each becomes a view of the result."""
    tensors = [getattr(part, name) for part in parts]
    if len(tensors) == 1 or tensors[0] is None:
        return tensors[0]
    axis = 0 if name == "bias" else 1  # that of the outputs
    whole = torch.cat(tensors, axis)
    for part, view in zip(parts, whole.split([tensor.shape[axis] for tensor in tensors], axis)):
        setattr(part, name, view)
    return whole


class Int4Codes:
    """Keeps a checkpoint's codes of four bits, on `device`.

    A layer that does not fit, or of other codes, is the caller's.  So are all layers from the first on whose product is
    wrong, with a warning: the kernel does not work on this device.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, verify: bool) -> None:
        self.count = 0
        self._dtype, self._device = dtype, device
        self._verified: set[Any] | None = set() if verify else None
        self._ops: Int4Ops | None = select_int4(device)

    def layer(self, weight: Coded, bias: Tensor | None, name: str) -> Int4Linear | None:
        """The layer with these numbers, none of them rounded; None if it cannot be."""
        if self._ops is None or not isinstance(weight, StoredWeight) or weight.bits != 4:
            return None
        if not fits(weight.shape[1], weight.group):
            return None
        order = None if weight.order is None else weight.order.to(self._device, torch.int32)
        bias = None if bias is None else bias.to(self._device)
        made = Int4Linear(_of_stored(weight, self._device), bias, order, self._dtype, self._ops)
        if self._verified is not None and (why := _wrong(made, self._verified)) is not None:
            _log.warning(
                "weights in four bits are dequantised to %s: the product of %s %s",
                str(self._dtype).removeprefix("torch."), name, why,
            )  # fmt: skip
            self._ops = None
            return None
        self.count += 1
        return made


def _of_stored(weight: StoredWeight, device: torch.device) -> Int4Weight:
    """The same numbers, in tiles on `device`."""
    span = span_of(weight.shape[1], weight.group)
    assert span is not None
    offsets = None if bool((weight.zeros == ZERO).all()) else weight.zeros.t().contiguous().to(device)
    return Int4Weight(
        tiled(weight.codes.to(device), span), shortest(weight.scales.t().contiguous().to(device)), offsets
    )


def fitting_linears(model: nn.Module, hf_config: Any) -> dict[str, nn.Linear]:
    """The linear layers of the decoder layers that are plain and can be in four bits, by their paths in `model`."""
    found = decoder_linears(model, hf_config)
    return {name: linear for name, linear in found.items() if fits(linear.in_features)}


def quantize_linears(
    model: nn.Module, hf_config: Any, importance: Mapping[str, Tensor], device: torch.device, verify: bool
) -> nn.Module:
    """Quantise the linear layers of the decoder layers that are not in codes yet, and move everything to `device`.

    A weight is freed as soon as it is quantised: `device` takes no more than the result and one layer.

    Args:
        importance: of the inputs of some layers, by path; see `WeightFormat.encode`.
        verify: compare products of each size with those of the dequantised weight.

    Raises:
        LoadError: there is nothing to quantise, or a product is wrong on this device.
    """
    names = list(fitting_linears(model, hf_config))
    stored = next((module for module in model.modules() if isinstance(module, Int4Linear)), None)
    if not names and stored is None:
        raise LoadError(
            f'quantization="int4" is not supported: {type(model).__name__} has no linear layer in its decoder layers '
            f"whose inputs are a multiple of {_GROUP}; remove it"
        )
    ops, verified = select_int4(device) if stored is None else stored._ops, set[Any]()

    def make(linear: nn.Linear, name: str) -> nn.Module:
        made = Int4Linear.quantized(linear, importance.get(name), device, ops)
        if not bool(made.factors.isfinite().all()):  # type: ignore[union-attr]
            raise LoadError(f"{name}.weight has infinite or undefined numbers; download the checkpoint again")
        if verify and (why := _wrong(made, verified)) is not None:
            raise LoadError(f'quantization="int4" does not work here: the product of {name} {why}; remove it')
        return made

    replace_linears(model, names, make, "int4")
    return model.to(device)


@torch.inference_mode()
def _wrong(made: Int4Linear, verified: set[Any]) -> str | None:
    """Compile the kernels of a layer and compare a few products with those of the dequantised weight.

    Args:
        verified: the kinds of layers that are right; a new one is added.

    Returns:
        How they fail or differ, if they do.
    """
    weight = made.int4_weight
    kind = made.codes.shape, made.scales.shape, made.scales.dtype, made.offsets is None, made.bias is None
    if kind in verified:
        return None
    plain, size = weight.dequantised(torch.float32), f"[{made.out_features}, {made.in_features}]"
    for rows in (1, 17, 33, made._ops.max_rows + 1):  # one of each kernel
        x = torch.randn(rows, made.in_features, generator=torch.Generator().manual_seed(0))
        x = x.to(device=made.codes.device, dtype=made.dtype)
        ordered = x if made.order is None else x[:, made.order]
        expected = F.linear(ordered.float(), plain, None if made.bias is None else made.bias.float())
        try:
            off = ((made(x).float() - expected).norm() / expected.norm().clamp_min(1e-9)).item()
        except Exception as error:  # of the compiler, or of a launch
            return f"{size} fails: {in_one_line(error)}"
        if not off <= _TOLERANCE * torch.finfo(made.dtype).eps:
            return f"{size} with {rows} rows differs by {off:.1%} from that of the dequantised weight"
    verified.add(kind)
    return None
