"""Linear layers with weights in the order in which the CPU kernel reads them.

`pack_linears` replaces every `nn.Linear` of a model that the kernel supports, and those in codes.  Each plain weight is
freed as soon as it is packed; `undo` restores it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from inflight.kernels.cpu.cpu_linear import PackedWeight, linear, unsupported_weight
from inflight.kernels.cpu.library import discard, unavailable
from inflight.kernels.cpu.weight_format import UNCHANGED, Formats
from inflight.loading.quantization.coded_linear import CodedLinear, shared_weights

__all__ = ["PackedLinear", "drop_weights", "pack_linears"]


class PackedLinear(nn.Module):
    """`nn.Linear` by the native kernel, with the same output up to rounding."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self.packed = weight
        self.in_features, self.out_features = weight.in_features, weight.out_features

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.packed)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.packed.dtype}"


def drop_weights(linears: list[nn.Linear], packed: PackedWeight, shared: set[int]) -> Callable[[], None]:
    """Free the weights of `linears`, which `packed` contains in this order, except those at addresses in `shared`.

    Returns:
        A function that restores them.
    """
    dropped = [module for module in linears if module.weight.data_ptr() not in shared]
    for module in dropped:
        discard(module.weight.data)
        module.weight.data = module.weight.new_empty(0)

    def restore() -> None:
        for module, weight in zip(linears, packed.unpack()):
            if module in dropped:
                module.weight.data = weight

    return restore


def pack_linears(model: nn.Module, stored_as: Formats = UNCHANGED) -> Callable[[], None] | None:
    """Replace the linear layers of `model`, which is on a CPU, in place.

    Weights that another module also uses (a tied embedding) are copied, others are moved.

    Args:
        stored_as: the formats of the weights.

    Returns:
        A function that restores everything (weights as their codes say), or None if nothing
        can be packed.
    """
    if unavailable() is not None:
        return None
    shared = shared_weights(model)
    undone: list[Callable[[], None]] = []
    replaced: dict[nn.Linear, PackedLinear] = {}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is CodedLinear:
                assert module.packed is not None
                setattr(parent, name, PackedLinear(module.packed))
                undone.append(partial(setattr, parent, name, module))
                continue
            if type(module) is not nn.Linear:
                continue
            if module not in replaced:
                if unsupported_weight(module.weight) is not None:
                    continue
                stored = stored_as.head if parent is model else stored_as.layers  # layers lie deeper
                replaced[module] = PackedLinear(PackedWeight([module.weight], [module.bias], stored_as=stored))
                undone.append(drop_weights([module], replaced[module].packed, shared))
            setattr(parent, name, replaced[module])
            undone.append(partial(setattr, parent, name, module))

    def undo() -> None:
        for step in undone:
            step()

    return undo if undone else None
