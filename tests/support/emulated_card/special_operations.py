"""Operations that an emulated card computes in a way of their own: copies, reads by the host, what a CPU lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emulated_card.scaled_mm import scaled_mm
from emulated_card.streams import device_side
from emulated_card.tensors import CudaTensor, check_devices, contents, each_tensor, mapped, meta_of, new_tensor, store

if TYPE_CHECKING:
    from emulated_card.card import Card

__all__ = ["SPECIAL", "to_copy"]

aten = torch.ops.aten


def to_copy(
    card: Card,
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    target = self.device if device is None else torch.device(device)
    source = self.meta if isinstance(self, CudaTensor) else self
    with device_side():
        changes = {} if memory_format is None else {"memory_format": memory_format}
        shape = torch.empty_like(source, dtype=dtype or self.dtype, device="meta", **changes)
    made: Tensor
    if target.type == "cuda":
        made = new_tensor(card, shape.size(), shape.stride(), shape.dtype)
    elif target.type == "cpu":
        with device_side():
            made = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
        made = card.pinned_copy_of(made) if pin_memory or non_blocking else torch.empty_like(made)
    else:
        return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device=target)
    return _copy(card, made, self, non_blocking)


def _copy(card: Card, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, CudaTensor):
        with device_side():
            target.meta.copy_(meta_of(source))  # the shapes fit
        memory = [x.memory for x in (target, source) if isinstance(x, CudaTensor) and x.memory is not None]
        if isinstance(source, CudaTensor):
            card.launch(functools.partial(target.inner.copy_, source.inner), memory)
            return target
        if not source.numel():
            return target
        if non_blocking and source not in card.pinned:
            card.forbid_in_capture("a copy of memory that is not pinned")
            source = source.clone()  # the driver reads it before the call returns
        card.launch(functools.partial(target.inner.copy_, source), memory)
        if not non_blocking:
            card.wait("a blocking copy from the host")
        return target
    assert isinstance(source, CudaTensor)
    memory = [] if source.memory is None else [source.memory]
    if non_blocking and target in card.pinned:
        card.launch(functools.partial(target.copy_, source.inner), memory)
    elif source.numel():
        card.wait("a copy to memory of the host that is not pinned" if non_blocking else "a blocking copy to the host")
        with torch.inference_mode():
            plain = source.inner.clone()
        with torch.no_grad():
            target.copy_(plain)
    return target


def _item(card: Card, self: CudaTensor) -> Any:
    card.wait("Tensor.item")
    with device_side():
        return self.inner.item()


def _equal(card: Card, self: Tensor, other: Tensor) -> bool:
    check_devices(aten.index.Tensor, [self, other])
    card.wait("torch.equal")
    with device_side():
        return torch.equal(contents(self), contents(other))


def _nothing(card: Card, *args: Any) -> None:
    """`record_stream`: memory that is freed is never given to another stream."""


def _scaled(card: Card, *args: Any, **kwargs: Any) -> Tensor:
    values = each_tensor((args, kwargs))
    check_devices(aten._scaled_mm.default, values)
    made_of = functools.partial(scaled_mm, *mapped(args, contents), **mapped(kwargs, contents))
    with device_side():
        shape = scaled_mm(*mapped(args, meta_of), **mapped(kwargs, meta_of))
    made = new_tensor(card, shape.size(), shape.stride(), shape.dtype)
    used = [value.memory for value in (*values, made) if isinstance(value, CudaTensor) and value.memory is not None]
    card.launch(functools.partial(store, made_of, [made.inner]), used)
    return made


def _histogram(card: Card, self: CudaTensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """`torch.histc`, which on a GPU also counts integers."""
    made, inner = new_tensor(card, (bins,), (1,), self.dtype), self.inner
    used = [value.memory for value in (self, made) if value.memory is not None]
    card.launch(lambda: made.inner.copy_(torch.histc(inner.double(), bins, min, max)), used)
    return made


def _grouped_product(card: Card, self: Tensor, mat2: Tensor, offs: Tensor, **options: Any) -> Tensor:
    """`torch._grouped_mm` of rows [T, K], grouped by `offs`, and matrices [G, K, N]: torch's shape function takes only
    bfloat16."""
    assert (self.dim(), mat2.dim()) == (2, 3) and not any(value is not None for value in options.values())
    check_devices(aten._grouped_mm.default, [self, mat2, offs])
    shape = torch.empty(len(self), mat2.shape[2], dtype=self.dtype, device="meta")
    made = new_tensor(card, shape.size(), shape.stride(), shape.dtype)
    work = functools.partial(aten._grouped_mm.default, contents(self), contents(mat2), contents(offs))
    values = (self, mat2, offs, made)
    used = [value.memory for value in values if isinstance(value, CudaTensor) and value.memory is not None]
    card.launch(functools.partial(store, work, [made.inner]), used)
    return made


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy,
    aten._to_copy.default: to_copy,
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.record_stream.default: _nothing,
    aten._scaled_mm.default: _scaled,
    aten._grouped_mm.default: _grouped_product,
    aten.histc.default: _histogram,
}
