"""Tensors of an emulated card.

A `CudaTensor` says that it is on cuda:0; its contents are a CPU tensor that only the card's work touches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emulated_card.memory import Allocation
from emulated_card.streams import device_side

if TYPE_CHECKING:
    from emulated_card.card import Card

__all__ = [
    "CUDA",
    "INDEXING",
    "CudaTensor",
    "borrowed",
    "check_devices",
    "contents",
    "each_tensor",
    "kind_of",
    "launch_function",
    "mapped",
    "meta_of",
    "new_tensor",
    "store",
]

aten = torch.ops.aten
CUDA = torch.device("cuda:0")
# Arguments that contain no tensor.  `isinstance(x, Tensor)` takes ten times as long as a look into this set.
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
INDEXING = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


class CudaTensor(Tensor):
    """A tensor on the emulated card.

    Attributes:
        inner: its contents, once the stream's work has run.
        memory: the allocation that it keeps alive; None for memory that it does not own.
        shape_key: its size, strides and dtype, once something has asked for them (`kind_of`).
    """

    inner: Tensor  # type: ignore[assignment]  # hides torch.inner
    memory: Allocation | None
    card: Card
    shape_key: tuple[Any, ...] | None = None

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Allocation | None, card: Card) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
        )
        made.inner, made.memory, made.card = inner, memory, card
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        card = next(value.card for value in each_tensor((args, kwargs or {})) if isinstance(value, CudaTensor))
        return card.dispatch(func, args, kwargs or {})

    @functools.cached_property
    def meta(self) -> Tensor:
        return torch.empty_strided(self.inner.size(), self.inner.stride(), dtype=self.inner.dtype, device="meta")

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory "
            "first."
        )

    __array__ = numpy

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"CudaTensor(shape={list(self.shape)}, dtype={self.dtype}, device='cuda:0')"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Any = self.clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=False)
        memo[id(self)] = copied
        return copied

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, CudaTensor) or (value.shape, value.dtype, value.stride()) != (
            self.shape,
            self.dtype,
            self.stride(),
        ):
            raise NotImplementedError("Tensor.data = a tensor of another shape, dtype or device")
        self.inner, self.memory = value.inner, value.memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise NotImplementedError("torch makes it of the type of the elements; make one by hand")


def each_tensor(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    found: list[Tensor] = []
    _find_tensors((value,), found)
    return found


def _find_tensors(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is CudaTensor or isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _find_tensors(value, found)
        elif isinstance(value, dict):
            _find_tensors(value.values(), found)


def mapped(value: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """`value` with each of its tensors replaced."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is CudaTensor or isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, (list, tuple)):
        return kind([item if type(item) in _PLAIN else mapped(item, of_tensor) for item in value])
    if isinstance(value, dict):
        return {key: mapped(item, of_tensor) for key, item in value.items()}
    return value


def kind_of(value: Any) -> Any:
    """Equal for arguments that give results of the same shapes.  Raises TypeError: some have no hash."""
    kind = type(value)
    if kind is CudaTensor:
        if value.shape_key is None:
            value.shape_key = "tensor", tuple(value.size()), value.stride(), value.dtype
        return value.shape_key
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, Tensor):
        return "tensor", tuple(value.size()), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(kind_of, value))
    if isinstance(value, dict):
        return tuple([(key, kind_of(item)) for key, item in value.items()])
    return kind, value


def contents(value: Tensor) -> Tensor:
    """The tensor that the card's work reads and writes.  A host scalar is read when the work is launched."""
    if isinstance(value, CudaTensor):
        return value.inner
    return value.clone() if value.dim() == 0 else value


def new_tensor(card: Card, size: Any, stride: Any, dtype: torch.dtype) -> CudaTensor:
    """On the card, with undefined contents."""
    count = 0 if 0 in size else 1 + sum([(n - 1) * step for n, step in zip(size, stride)])
    memory = card.allocate(count * dtype.itemsize, dtype)
    with device_side():
        inner = torch.empty(0, dtype=dtype).set_(memory.storage, 0, size, stride)
    return CudaTensor(inner, memory, card)


def launch_function(function: Callable[..., Any], *arguments: Any) -> None:
    """Launch a function of torch on CPU tensors as one kernel: it gets the contents of the card's tensors.

    Its results must go to tensors among its arguments.
    """
    values = [value for value in each_tensor(arguments) if isinstance(value, CudaTensor)]
    card = values[0].card
    used = [value.memory for value in values if value.memory is not None]
    check_devices(function, each_tensor(arguments))
    card.launch(functools.partial(function, *mapped(arguments, contents)), used)


def borrowed(card: Card, inner: Tensor) -> CudaTensor:
    """On the card, without owning its memory."""
    return CudaTensor(inner, None, card)


def check_devices(func: Any, values: list[Tensor]) -> None:
    """0-dimensional tensors of the host are numbers, except where they are indices."""
    for value in values:
        if not isinstance(value, CudaTensor) and (value.dim() or func in INDEXING) and value.device.type != "meta":
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"{value.device}! ({func})"
            )


def meta_of(value: Tensor) -> Tensor:
    if isinstance(value, CudaTensor):
        return value.meta
    return value if value.device.type == "meta" else torch.empty_like(value, device="meta")


def store(work: Callable[[], Any], targets: list[Tensor]) -> None:
    for target, result in zip(targets, each_tensor(work())):
        target.copy_(result)
