"""Experts, their routers and GPT-2's layers by the packed CPU kernel, whose rows do not depend on one another.

torch's matrix products round a row differently in batches of different sizes.  A mixture of experts multiplies as many
rows as happen to choose an expert, so a seeded request could get other tokens beside other requests.  Here each
product is one of `PackedWeight`: the same to the last bit for any number of rows, as `packed_linear.py` makes it for
`nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from inflight.kernels.cpu.cpu_linear import PackedWeight, linear, unsupported_weight
from inflight.kernels.cpu.library import discard, unavailable

__all__ = ["pack_others"]

Undo = Callable[[], None]


def pack_others(model: nn.Module) -> Undo | None:
    """Replace what `pack_linears` leaves of the products of `model`, which is on a CPU, in place.

    Returns:
        A function that restores everything, or None if there is nothing to replace.
    """
    if unavailable() is not None:
        return None
    undone: list[Undo] = []
    for module in model.modules():
        if isinstance(module, Conv1D):
            undone += _pack_conv(module)
        elif hasattr(module, "is_transposed") and hasattr(module, "_apply_gate"):  # transformers' ExpertsInterface
            undone += _pack_experts(module)
        elif type(module).__name__.endswith(("Router", "Gate")):
            undone += _pack_router(module)

    def undo() -> None:
        for step in undone:
            step()

    return undo if undone else None


def _pack_conv(module: Conv1D) -> list[Undo]:
    """A linear layer whose weight is stored as [in_features, out_features]."""
    plain = module.weight.data.t()
    if unsupported_weight(plain) is not None:
        return []
    packed = PackedWeight([plain], [module.bias])
    _drop(module.weight)
    module.forward = lambda x: linear(x, packed)  # type: ignore[method-assign]

    def restore() -> None:
        del module.forward
        module.weight.data = packed.unpack()[0].t().contiguous()

    return [restore]


class _PackedExperts:
    """The two layers of each expert."""

    def __init__(self, module: Any) -> None:
        self.up_name = "gate_up_proj" if module.has_gate else "up_proj"
        self.names = (self.up_name, "down_proj")
        self.is_transposed = bool(module.is_transposed)
        # Only experts of later versions than transformers 5.17 can have one.
        self.post_norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
        self.up, self.down = (self._packed(module, name) for name in self.names)

    def _plain(self, weight: Tensor) -> Tensor:
        return weight.t() if self.is_transposed else weight

    def _packed(self, module: Any, name: str) -> list[PackedWeight]:
        weights = getattr(module, name).data
        biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
        return [PackedWeight([self._plain(weight)], [bias]) for weight, bias in zip(weights, biases)]

    def drop(self, module: Any) -> None:
        for name in self.names:
            _drop(getattr(module, name))

    def restore(self, module: Any) -> None:
        for name, packed in zip(self.names, (self.up, self.down)):
            plain = [self._plain(weight.unpack()[0]) for weight in packed]
            getattr(module, name).data = torch.stack(plain).contiguous()


def _pack_experts(module: Any) -> list[Undo]:
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    weights = [getattr(module, name, None) for name in names]
    if not all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights):
        return []
    turned = [weight[0].t() if module.is_transposed else weight[0] for weight in weights if weight is not None]
    if any(unsupported_weight(weight) is not None for weight in turned):
        return []
    packed = _PackedExperts(module)
    packed.drop(module)
    module.forward = partial(_experts_forward, module, packed)

    def restore() -> None:
        del module.forward
        packed.restore(module)

    return [restore]


def _experts_forward(
    module: Any, packed: _PackedExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """hidden_states [T, H], top_k_index and top_k_weights [T, K] -> [T, H]; as transformers' grouped implementation."""
    num_tokens, num_choices = top_k_index.shape
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    rows = hidden_states[order // num_choices]
    counts = torch.bincount(experts, minlength=len(packed.up)).tolist()
    parts, start = [], 0
    for expert, count in enumerate(counts[: len(packed.up)]):
        if count:
            inner = linear(rows[start : start + count], packed.up[expert])
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            parts.append(linear(inner, packed.down[expert]))
            start += count
    out = torch.cat(parts)
    if packed.post_norm is not None:
        out = packed.post_norm(out)
    out = out * top_k_weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return out[back].view(num_tokens, num_choices, -1).sum(dim=1).to(hidden_states.dtype)


def _pack_router(module: nn.Module) -> list[Undo]:
    """A router multiplies by its own parameter; that is replaced by a tensor that knows how."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or unsupported_weight(weight) is not None:
        return []
    del module.weight
    module.weight = _PackedTensor.of(weight)

    def restore() -> None:
        del module.weight
        module.weight = weight

    return [restore]


class _PackedTensor(Tensor):
    """A weight whose products with rows of its dtype are computed by the packed kernel; otherwise a plain tensor."""

    packed: PackedWeight

    @classmethod
    def of(cls, weight: Tensor) -> _PackedTensor:
        tensor = weight.data.as_subclass(cls)
        tensor.packed = PackedWeight([weight.data])
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) >= 2 and isinstance(args[1], cls) and args[0].dtype == args[1].dtype:
            out = linear(args[0], args[1].packed)
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return out if bias is None else out + bias
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _drop(parameter: Tensor) -> None:
    discard(parameter.data)
    parameter.data = parameter.new_empty(0)
