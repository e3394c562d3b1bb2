"""Linear layers in fp8: e4m3 weights with a scale per output channel, and inputs quantised row by row.

On a GPU with fp8 tensor cores a product is one `torch._scaled_mm` (`fp8_product.py`).  On other devices the same
numbers are multiplied in float32: the twin by which tests know what a card computes, up to the order of additions.

Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.kernels.registry import select_ops
from inflight.loading.load_errors import LoadError, in_one_line
from inflight.loading.quantization.fp8_product import product, that_runs
from inflight.ops.base import FusedOps, QuantizedRows

__all__ = [
    "Fp8Linear",
    "concatenated",
    "decoder_linears",
    "fits",
    "product",
    "quantize_linears",
    "replace_linears",
    "unsupported",
]

_log = logging.getLogger(__name__)

_MIN_CAPABILITY = (8, 9)
_MULTIPLE = 16  # cuBLAS requires that it divides both sizes of a weight
# Relative error of a product of random inputs: rounding weights and inputs to three bits of mantissa costs 3.7%.
_TOLERANCE = 0.1
_ROUTERS = ("gate", "router", "shared_expert_gate")


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `device` has no fp8 products with results in `dtype`; None if it has."""
    if device.type != "cuda":
        return f"it needs a GPU, and the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, _MIN_CAPABILITY))
        return f"it needs a GPU of compute capability {need} or later, and this one has {have}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs dtype bfloat16 or float16, and the model's is {str(dtype).removeprefix('torch.')}"
    return None


def fits(linear: nn.Linear) -> bool:
    """Whether fp8 products support the layer's sizes."""
    return linear.in_features % _MULTIPLE == 0 and linear.out_features % _MULTIPLE == 0


class Fp8Linear(nn.Module):
    """`nn.Linear` with a weight in e4m3.

    Attributes:
        weight: e4m3 [N, K], contiguous: what `_scaled_mm` reads as a column-major [K, N].
        weight_scale: float32 [N]; actual weight = weight * weight_scale[:, None].
        bias: [N], or None.
        dtype: of inputs that are not quantised yet, and of results.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype, ops: FusedOps
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)
        self._ops = ops
        self._product = that_runs(product, weight, weight_scale, bias, dtype)

    @classmethod
    def quantized(cls, linear: nn.Linear, device: torch.device, ops: FusedOps) -> Fp8Linear:
        """The layer on `device`, its weight rounded; each channel's largest weight becomes 448."""
        return cls.in_place_of(linear, ops.quantize_rows(linear.weight.data.to(device)), ops)

    @classmethod
    def in_place_of(cls, linear: nn.Linear, weight: QuantizedRows, ops: FusedOps) -> Fp8Linear:
        """A layer with this weight [N, K], and the bias and dtype of `linear`."""
        bias = None if linear.bias is None else linear.bias.data.to(weight.values.device)
        return cls(weight.values, weight.scales, bias, linear.weight.dtype, ops)

    @classmethod
    def merged(cls, parts: Sequence[Fp8Linear]) -> Fp8Linear:
        """All layers in one product, results side by side; tensors of `parts` become views of the merged ones.

        Raises:
            ValueError: some of them only have a bias, or dtypes or inputs differ.
        """
        first = parts[0]
        if len({(part.dtype, part.in_features, part.bias is None) for part in parts}) > 1:
            raise ValueError("the layers differ in dtype, in the size of their input, or in whether they have a bias")
        bias = None if first.bias is None else concatenated(parts, "bias")
        weight, scale = concatenated(parts, "weight"), concatenated(parts, "weight_scale")
        return cls(weight, scale, bias, first.dtype, first._ops)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """x [..., K] or its rows quantised -> [..., N].  An x of another dtype than the layer's is not quantised."""
        if isinstance(x, QuantizedRows):
            return self._product(x, self.weight, self.weight_scale, self.bias, self.dtype)
        if x.dtype != self.dtype:  # float32: the check at load asks for what the weights mean, without rounding
            return F.linear(x, self.weight.to(x.dtype) * self.weight_scale[:, None], self.bias)
        rows = self._ops.quantize_rows(x.reshape(-1, self.in_features))
        out = self._product(rows, self.weight, self.weight_scale, self.bias, self.dtype)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.dtype}"


def decoder_linears(model: nn.Module, hf_config: Any) -> dict[str, nn.Linear]:
    """The linear layers of the decoder layers, by name, but for routers of experts."""
    num_layers = hf_config.get_text_config(decoder=True).num_hidden_layers
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found: dict[str, nn.Linear] = {}
    for prefix, layers in lists:
        if len(layers) == num_layers:
            found |= {
                f"{prefix}.{name}": module
                for name, module in layers.named_modules()
                if type(module) is nn.Linear and not _is_router(layers, name)
            }
    return found


def _is_router(layers: nn.Module, name: str) -> bool:
    parent, _, child = name.rpartition(".")
    return child in _ROUTERS or "Router" in type(layers.get_submodule(parent)).__name__


def quantize_linears(model: nn.Module, hf_config: Any, device: torch.device, verify: bool) -> nn.Module:
    """Quantise the linear layers of the decoder layers, and move everything to `device`.

    A weight is freed as soon as it is quantised: `device` takes no more than the result and one layer.

    Args:
        verify: compare one product of each size with that of the plain weights.

    Raises:
        LoadError: there is nothing to quantise, or a product is wrong on this device.
    """
    found = decoder_linears(model, hf_config)
    names = [name for name, linear in found.items() if fits(linear)]
    if not names:
        raise LoadError(
            f'quantization="fp8" is not supported: {type(model).__name__} has no linear layer in its decoder layers '
            f"whose sizes are multiples of {_MULTIPLE}; remove it"
        )
    ops, verified = select_ops(device), set[tuple[int, int]]()

    def make(linear: nn.Linear, name: str) -> nn.Module:
        made = Fp8Linear.quantized(linear, device, ops)
        size = linear.out_features, linear.in_features
        if verify and size not in verified:
            verified.add(size)
            _verify(made, linear, name)
        return made

    del found  # which keeps the plain weights
    replace_linears(model, names, make)
    return model.to(device)


def replace_linears(
    model: nn.Module, names: Iterable[str], make: Callable[[nn.Linear, str], nn.Module], stored_as: str = "fp8"
) -> None:
    """Put `make(linear, name)` in the place of each layer, one by one; the layer is freed before the next is made.

    Args:
        stored_as: for the log.
    """
    count = 0
    for name in names:
        model.set_submodule(name, make(model.get_submodule(name), name))  # type: ignore[arg-type]
        count += 1
    _log.info("%d linear layers of %s are in %s", count, type(model).__name__, stored_as)


def concatenated(parts: Sequence[nn.Module], name: str) -> Tensor:
    """The parts' tensors of this name, side by side; each becomes a view of the result."""
    tensors = [part.get_buffer(name) for part in parts]
    if len(tensors) == 1:
        return tensors[0]
    # Not every device concatenates fp8, but every one concatenates bytes.
    whole = torch.cat([tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor for tensor in tensors])
    whole = whole.view(tensors[0].dtype)
    for part, view in zip(parts, whole.split([len(tensor) for tensor in tensors])):
        setattr(part, name, view)
    return whole


@torch.inference_mode()
def _verify(made: Fp8Linear, linear: nn.Linear, name: str) -> None:
    """
    Raises:
        LoadError: see `quantize_linears`.
    """
    weight = linear.weight.to(made.weight.device)
    x = torch.randn(17, linear.in_features, generator=torch.Generator().manual_seed(0)).to(weight)
    expected = F.linear(x, weight, made.bias).float()
    try:
        off = ((made(x).float() - expected).norm() / expected.norm().clamp_min(1e-9)).item()
        why = f"differs by {off:.1%} (tolerance: {_TOLERANCE:.0%}) from that of plain weights"
    except RuntimeError as error:  # no kernel for this card
        off, why = float("inf"), f"fails: {in_one_line(error)}"
    if not off <= _TOLERANCE:
        size = f"[{made.out_features}, {made.in_features}]"
        raise LoadError(f'quantization="fp8" does not work here: the product of {name} {size} {why}; remove it')
