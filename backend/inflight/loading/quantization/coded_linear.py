"""Linear layers on a CPU whose weights are codes: of a checkpoint, or quantised at load.

A layer computes the definition, in float32, with which the load check compares.  Forward passes take its packed weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.config import EngineConfig
from inflight.kernels.cpu.cpu_linear import PackedWeight, unsupported_weight
from inflight.kernels.cpu.library import discard, unavailable
from inflight.kernels.cpu.stored_codes import StoredCodes, dequantized, joined, outputs_of
from inflight.kernels.cpu.weight_format import Codes, Formats, Values, WeightFormat
from inflight.loading.load_errors import LoadError
from inflight.loading.quantization.block_weight import BlockWeight
from inflight.loading.quantization.stored_weight import ROWS, Coded, StoredWeight, shortest

__all__ = [
    "ROUNDED_INPUTS",
    "CodedLinear",
    "CpuCodes",
    "dequantise",
    "keeps_codes",
    "layers_in",
    "num_weights",
    "packed_together",
    "quantise",
    "rounds_inputs",
    "shared_weights",
    "stored_codes",
]

# Relative error of logits that inputs in eight bits explain: about 1%, and several times that in random weights, which
# amplify it from layer to layer.
ROUNDED_INPUTS = 0.25


class CodedLinear(nn.Module):
    """`nn.Linear` with a weight in codes.

    Attributes:
        dtype: of the model.
        packed: the weight; None while a merged one has it.
    """

    packed: PackedWeight | None

    def __init__(self, codes: Codes, size: tuple[int, int], bias: Tensor | None, dtype: torch.dtype) -> None:
        """
        Args:
            size: outputs and inputs.
        """
        super().__init__()
        self.out_features, self.in_features = size
        self.dtype = dtype
        self.packed = PackedWeight.of_codes(codes, dtype, (self.in_features, [self.out_features]), [bias])
        self.bias = self.packed.bias

    def codes(self) -> Codes:
        assert self.packed is not None
        return self.packed.codes()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]: the definition.  Computed in float32, some outputs at a time."""
        with torch._C.DisableTorchFunction():  # dtypes of stored numbers are what they are, also in `InFloat32`
            codes = self.codes()
        parts, wide = [], x.to(torch.float32)
        for start in range(0, self.out_features, ROWS):
            with torch._C.DisableTorchFunction():
                weight = dequantized(outputs_of(codes, start, start + ROWS))
            bias = None if self.bias is None else self.bias[start : start + ROWS]
            parts.append(F.linear(wide, weight, bias))
        return torch.cat(parts, -1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.dtype}"


class CpuCodes:
    """Keeps a checkpoint's codes, in panels.  A layer that does not fit is the caller's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.count = 0
        self._dtype = dtype

    def layer(self, weight: Coded, bias: Tensor | None, name: str) -> CodedLinear | None:
        """The layer with these numbers, none of them rounded; None if it cannot be."""
        codes = stored_codes(weight)
        if codes is None:
            return None
        self.count += 1
        return CodedLinear(codes, weight.shape, bias, self._dtype)


def keeps_codes(config: EngineConfig, device: torch.device) -> bool:
    """Whether a checkpoint's codes are kept on a CPU; `quantization` beside them is for the other layers."""
    return device.type == "cpu" and config.native_forward and config.quantization != "fp8" and unavailable() is None


def stored_codes(weight: Coded) -> StoredCodes | None:
    """The same numbers, as the kernel has them; None if it cannot."""
    if isinstance(weight, StoredWeight) and StoredCodes.fits(weight.shape[1], weight.group, weight.bits):
        return _of_integers(weight)
    if isinstance(weight, BlockWeight) and weight.kind.bits is not None:
        return _of_blocks(weight, weight.kind.bits)
    return None


def _of_integers(weight: StoredWeight) -> StoredCodes:
    zero = 2 ** (weight.bits - 1)
    minimums = (weight.zeros.to(torch.int16) - zero).to(torch.int8)
    return StoredCodes(
        weight.codes.contiguous(),
        weight.bits,
        zero,
        shortest(weight.scales).contiguous(),
        minimums.contiguous() if bool(minimums.any()) else None,
        order=None if weight.order is None else weight.order.to(torch.int32).contiguous(),
    )


def _of_blocks(weight: BlockWeight, bits: int) -> StoredCodes:
    found = []
    for start in range(0, weight.shape[0], ROWS):
        parts = weight.parts(start, start + ROWS)
        assert parts is not None
        rows = min(ROWS, weight.shape[0] - start)

        def of_rows(numbers: Tensor | None, dtype: torch.dtype | None = None, rows: int = rows) -> Tensor | None:
            return None if numbers is None else numbers.to(dtype or numbers.dtype).contiguous().view(rows, -1)

        scale, minimum = of_rows(parts.scale, torch.float16), of_rows(parts.min, torch.float16)
        scale_codes, min_codes = of_rows(parts.scale_codes), of_rows(parts.min_codes)
        has_units = scale_codes is not None
        found.append(
            StoredCodes(
                cast(Tensor, of_rows(parts.codes)),
                bits,
                parts.zero,
                cast(Tensor, scale_codes if has_units else scale),
                min_codes if has_units else minimum,
                scale if has_units else None,
                minimum if has_units else None,
            )
        )
    return joined(found)


def layers_in(model: nn.Module, formats: Formats) -> dict[str, tuple[nn.Linear, WeightFormat]]:
    """The layers that `quantise` looks at, by their paths in `model`."""
    return {
        name: (linear, formats.layers if "." in name else formats.head)
        for name, linear in model.named_modules(remove_duplicate=True)
        if type(linear) is nn.Linear and unsupported_weight(linear.weight) is None
    }


def quantise(model: nn.Module, formats: Formats, importance: Mapping[str, Tensor]) -> None:
    """Put a `CodedLinear` in the place of each `nn.Linear` of `model`; weights are freed as soon as they are quantised.

    Layers that their format leaves as they are stay.

    Args:
        importance: of the inputs of some layers, by path; see `WeightFormat.encode`.

    Raises:
        LoadError: a weight is infinite or not a number.
    """
    shared = shared_weights(model)
    for name, (linear, format) in layers_in(model, formats).items():
        codes = format.encode(linear.weight.data.contiguous(), importance.get(name))
        if isinstance(codes, Values):
            continue
        if codes.scales is not None and not bool(codes.scales.isfinite().all()):
            raise LoadError(f"{name}.weight has infinite or undefined numbers; download the checkpoint again")
        size = linear.out_features, linear.in_features
        model.set_submodule(name, CodedLinear(codes, size, linear.bias, linear.weight.dtype))
        if linear.weight.data_ptr() not in shared:
            discard(linear.weight.data)


def rounds_inputs(model: nn.Module) -> bool:
    """Whether products of some layer round their inputs to eight bits, because its weight is in codes."""
    return any(isinstance(module, CodedLinear) for module in model.modules())


def num_weights(model: nn.Module) -> int:
    """In parameters and in codes."""
    coded = (module for module in model.modules() if isinstance(module, CodedLinear))
    in_codes = sum(module.out_features * module.in_features for module in coded)
    return in_codes + sum(parameter.numel() for parameter in model.parameters())


def packed_together(
    linears: Sequence[nn.Module], gated: bool, encode: Callable[[Sequence[nn.Linear]], PackedWeight]
) -> tuple[PackedWeight, Callable[[], None]] | None:
    """Layers of the same inputs, some of them `CodedLinear`, as one weight; those of other codes follow in a chain.

    Args:
        encode: packs plain layers.

    Returns:
        The weight, and a function that gives it back to the layers; None if a gate and its operand are in other codes.
    """
    runs: list[list[nn.Module]] = []
    for linear in linears:
        if runs and isinstance(linear, CodedLinear) and _joins(linear, runs[-1][0]):
            runs[-1].append(linear)
        else:
            runs.append([linear])
    if gated and len(runs) > 1:
        return None
    undone: list[Callable[[], None]] = []
    packed = [_packed(run, gated, encode, undone) for run in runs]
    for part, further in pairwise(packed):
        part.chain(further)
        undone.insert(0, partial(part.chain, None))

    def undo() -> None:
        for step in undone:
            step()

    return packed[0], undo


def _joins(linear: CodedLinear, other: nn.Module) -> bool:
    if not isinstance(other, CodedLinear) or linear.packed is None or other.packed is None:
        return False
    return linear.packed.joins(other.packed)


def _packed(
    run: Sequence[nn.Module],
    gated: bool,
    encode: Callable[[Sequence[nn.Linear]], PackedWeight],
    undone: list[Callable[[], None]],
) -> PackedWeight:
    if not isinstance(run[0], CodedLinear):
        return encode(cast(Sequence[nn.Linear], run))
    coded = cast(Sequence[CodedLinear], run)
    if len(coded) == 1 and not gated:
        assert coded[0].packed is not None
        return coded[0].packed
    size = coded[0].in_features, [linear.out_features for linear in coded]
    codes, biases = joined([linear.codes() for linear in coded]), [linear.bias for linear in coded]
    merged = PackedWeight.of_codes(codes, coded[0].dtype, size, biases, gated)
    for linear in coded:
        linear.packed = None

    def restore() -> None:
        start, codes = 0, merged.codes()
        for linear in coded:
            part = outputs_of(codes, start, start + linear.out_features)
            start += linear.out_features
            sizes = linear.in_features, [linear.out_features]
            linear.packed = PackedWeight.of_codes(part, linear.dtype, sizes, [linear.bias])

    undone.append(restore)
    return merged


def dequantise(linear: CodedLinear) -> nn.Linear:
    """The layer with a plain weight, rounded once."""
    codes, plain = linear.codes(), torch.empty(linear.out_features, linear.in_features, dtype=linear.dtype)
    for start in range(0, linear.out_features, ROWS):
        plain[start : start + ROWS] = outputs_of(codes, start, start + ROWS).dequantize()
    made = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    made.weight = nn.Parameter(plain, requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.to(linear.dtype), requires_grad=False)
    return made


def shared_weights(model: nn.Module) -> set[int]:
    """Addresses of weights that an embedding or more than one module uses."""
    modules = [module for module in model.modules() if isinstance(getattr(module, "weight", None), Tensor)]
    counts = Counter(module.weight.data_ptr() for module in modules)  # type: ignore[operator]
    embeddings = {module.weight.data_ptr() for module in modules if isinstance(module, nn.Embedding)}
    return {address for address, count in counts.items() if count > 1} | embeddings
