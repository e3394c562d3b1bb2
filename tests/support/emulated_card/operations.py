"""Dispatches operations of torch to an emulated card.

An operation learns the shape of its result from the meta device, allocates it, and launches the computation for later.
These are not late: operations whose result's size depends on contents wait for the stream, as on a GPU, and so do
operations that the meta device does not know.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emulated_card.memory import poison
from emulated_card.special_operations import SPECIAL, to_copy
from emulated_card.streams import device_side
from emulated_card.tensors import (
    CUDA,
    INDEXING,
    CudaTensor,
    check_devices,
    contents,
    each_tensor,
    kind_of,
    mapped,
    meta_of,
    new_tensor,
    store,
)

if TYPE_CHECKING:
    from emulated_card.card import Card

__all__ = ["dispatch"]

aten = torch.ops.aten

_ALLOCATE = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_ALIASES = {aten._unsafe_view.default, aten.lift_fresh.default, aten.lift.default}
_WHOLE = {aten.linear.default}  # composed of others for a CPU and a GPU alike, which would be four launches
_CHANGE_SHAPE = {aten.resize_.default, aten.set_.source_Tensor, aten.set_.source_Storage_storage_offset}


class _Operation:
    """The properties of an operation, found once: torch computes its hash in Python, so that each look-up is a call.

    Attributes:
        written: place and name of each argument that it writes to.
    """

    def __init__(self, func: Any) -> None:
        arguments, returns = enumerate(func._schema.arguments), func._schema.returns
        aliases = [item.alias_info for item in returns if item.alias_info is not None]
        self.func = func
        self.special = SPECIAL.get(func)
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        self.is_composite = is_composite and func not in _WHOLE
        self.is_view = func in _ALIASES or any(not alias.is_write for alias in aliases)
        self.allocates, self.changes_shape = func in _ALLOCATE, func in _CHANGE_SHAPE
        self.indexes = func in INDEXING
        self.is_sized_by_contents = (
            torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        )
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.written = [(i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write]
        self.num_returns = len(returns)


_operations: dict[int, _Operation] = {}


def _operation(func: Any) -> _Operation:
    found = _operations.get(id(func))
    if found is None:
        found = _operations[id(func)] = _Operation(func)
    return found


def dispatch(card: Card, func: Any, args: Any, kwargs: Any) -> Any:
    """One operation of torch, if it concerns the card."""
    values = each_tensor((args, kwargs) if kwargs else args)
    device = kwargs.get("device")
    to_card = device is not None and torch.device(device).type == "cuda"
    operation, has_card_tensor = _operation(func), any(isinstance(value, CudaTensor) for value in values)
    if not (to_card or has_card_tensor):
        if kwargs.get("pin_memory"):
            made = func(*args, **{**kwargs, "pin_memory": False})
            if operation.allocates:
                poison(made.untyped_storage(), made.dtype)()
            return card.pinned.add(made)
        devices = [value for value in args if isinstance(value, torch.device)]
        if not (devices and devices[0].type == "cuda"):
            return func(*args, **kwargs)
    if operation.is_composite:
        with card.mode:
            return func.decompose(*args, **kwargs)
    if operation.special is not None:
        return operation.special(card, *args, **kwargs)
    if operation.changes_shape:
        raise NotImplementedError(f"{func} of a tensor on the emulated card")
    if device is not None and not to_card:  # new_zeros and the like on the host
        return func(*mapped(args, lambda value: value.meta if isinstance(value, CudaTensor) else value), **kwargs)
    if operation.indexes:
        args = _indices_on_card(card, func, args)
        values = each_tensor((args, kwargs))
    check_devices(func, values)
    if kwargs:
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    return _run(card, operation, args, kwargs, values, makes=to_card)


def _indices_on_card(card: Card, func: Any, args: Any) -> Any:
    """torch copies indices from the host, and looks where masks are true; either waits for the card."""
    self, indices, *others = args
    found = []
    for index in indices:
        if index is not None and not isinstance(index, CudaTensor):
            index = index.to(CUDA) if index.dtype == torch.bool else to_copy(card, index, device=CUDA)
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += dispatch(card, aten.nonzero.default, (index,), {}).unbind(1)
        else:
            found.append(index)
    if others and not isinstance(others[0], CudaTensor) and others[0].dim() == 0:
        others[0] = to_copy(card, others[0], device=CUDA, non_blocking=True)
    return (self, found, *others)


def _run(card: Card, operation: _Operation, args: Any, kwargs: Any, values: list[Tensor], makes: bool) -> Any:
    """One kernel, or one change of strides."""
    func = operation.func
    inner_args, inner_kwargs = mapped(args, contents), mapped(kwargs, contents) if kwargs else kwargs
    if operation.is_view:
        (owner,) = [value for value in values if isinstance(value, CudaTensor)][:1]
        with device_side():
            made = func(*inner_args, **inner_kwargs)
        with torch.inference_mode(owner.is_inference()):
            return mapped(made, lambda inner: CudaTensor(inner, owner.memory, card))
    used = [value.memory for value in values if isinstance(value, CudaTensor) and value.memory is not None]
    if operation.is_sized_by_contents and not operation.indexes:  # whose masks are indices by now
        return _at_once(card, func, inner_args, inner_kwargs, str(func))
    call_kwargs = {"device": "cpu", **inner_kwargs} if makes else inner_kwargs
    try:
        shapes = _shapes_of(func, args, kwargs, makes)
    except NotImplementedError:
        if operation.written:
            raise
        card.launched_at_once[str(func)] += 1
        return _at_once(card, func, inner_args, call_kwargs, f"{func}, which the emulated card cannot run late")
    work = functools.partial(func, *inner_args, **call_kwargs)
    if operation.is_random:
        work = functools.partial(card.with_random_state, work)
    if operation.written:
        card.launch(work, used)
        return _result_of_writing(operation, args, kwargs)
    made = mapped(shapes, lambda shape: new_tensor(card, shape.size(), shape.stride(), shape.dtype))
    if not operation.allocates:
        outputs = [out for out in each_tensor(made) if isinstance(out, CudaTensor)]
        if outputs:
            owned = [out.memory for out in outputs if out.memory is not None]
            card.launch(functools.partial(store, work, [out.inner for out in outputs]), used + owned)
    return made


_shapes: dict[Any, Any] = {}


def _shapes_of(func: Any, args: Any, kwargs: Any, makes: bool) -> Any:
    """The results of an operation as meta tensors, which are not to be changed.

    Computed once for each kind of arguments: torch does it in Python, which takes longer than all else here.
    """
    try:
        key = id(func), makes, torch.get_default_dtype(), kind_of(args), kind_of(kwargs)
        if key in _shapes:
            return _shapes[key]
    except TypeError:  # an argument that has no hash
        key = None
    with device_side():
        meta_args, meta_kwargs = mapped(args, meta_of), mapped(kwargs, meta_of)
        shapes = func(*meta_args, **(meta_kwargs | ({"device": "meta"} if makes else {})))
    if key is not None:
        _shapes[key] = shapes
    return shapes


def _result_of_writing(operation: _Operation, args: Any, kwargs: Any) -> Any:
    targets = [args[i] if i < len(args) else kwargs[name] for i, name in operation.written]
    if operation.num_returns == 0:
        return None
    return targets[0] if operation.num_returns == 1 else tuple(targets[: operation.num_returns])


def _at_once(card: Card, func: Any, args: Any, kwargs: Any, why: str) -> Any:
    card.wait(why)
    with device_side():
        result = func(*args, **kwargs)
    return mapped(result, lambda inner: _holding(card, inner))


def _holding(card: Card, inner: Tensor) -> CudaTensor:
    made = new_tensor(card, inner.size(), inner.stride(), inner.dtype)
    with device_side():
        made.inner.copy_(inner)
    return made
