"""Linear layers whose weights lie in the order in which the CPU kernel reads them.

`pack_linears` replaces every `nn.Linear` of a model that the kernel can run; the plain weights go as
their packed copies come, and come back exactly on `undo`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from inflight.kernels.cpu.ops import PackedWeight, discard, linear, unavailable, unsupported_weight

__all__ = ["PackedLinear", "drop_weights", "pack_linears", "shared_weights"]


class PackedLinear(nn.Module):
    """`nn.Linear` by the native kernel.  Takes the same input and gives the same output up to rounding."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self.packed = weight
        self.in_features, self.out_features = weight.in_features, weight.out_features

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.packed)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.packed.dtype}"


def drop_weights(linears: list[nn.Linear], packed: PackedWeight, shared: set[int]) -> Callable[[], None]:
    """Free the weights that `packed` holds in this order; those whose address is in `shared` stay.

    Returns:
        The function that brings them back.
    """
    taken = [module for module in linears if module.weight.data_ptr() not in shared]
    for module in taken:
        discard(module.weight.data)
        module.weight.data = module.weight.new_empty(0)

    def restore() -> None:
        for module, weight in zip(linears, packed.unpack()):
            if module in taken:
                module.weight.data = weight

    return restore


def pack_linears(model: nn.Module, int8: bool = False) -> Callable[[], None] | None:
    """Replace the linear layers of `model`, which is on a CPU, in place.

    Weights that another module uses as well (a tied embedding) are copied, the others moved.

    Args:
        int8: in eight bits, see `PackedWeight`.

    Returns:
        The function that puts everything back (of weights in eight bits what they are now), or None when nothing
        can be packed here.
    """
    if unavailable() is not None:
        return None
    shared = shared_weights(model)
    undone: list[Callable[[], None]] = []
    made: dict[nn.Linear, PackedLinear] = {}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is not nn.Linear:
                continue
            if module not in made:
                if unsupported_weight(module.weight) is not None:
                    continue
                made[module] = PackedLinear(PackedWeight([module.weight], [module.bias], int8=int8))
                undone.append(drop_weights([module], made[module].packed, shared))
            setattr(parent, name, made[module])
            undone.append(partial(setattr, parent, name, module))

    def undo() -> None:
        for step in undone:
            step()

    return undo if undone else None


def shared_weights(model: nn.Module) -> set[int]:
    """Addresses of the weights that more than one module reads, or an embedding."""
    modules = [module for module in model.modules() if isinstance(getattr(module, "weight", None), Tensor)]
    counts = Counter(module.weight.data_ptr() for module in modules)  # type: ignore[operator]
    embeddings = {module.weight.data_ptr() for module in modules if isinstance(module, nn.Embedding)}
    return {address for address, count in counts.items() if count > 1} | embeddings
