"""CUDA graphs over CPU tensors: a capture records operations and addresses, a replay runs them on the present contents.

As with the real thing:
- host numbers are those of the capture, and a tensor read on the host ends it;
- a graph does not keep its inputs alive: if an address is no longer a tensor's, the replay fails (the real one would
  read arbitrary contents);
- data that is not in a tensor at a captured address has no effect;
- graphs share their memory: a replay destroys the outputs of the others.

Unlike the real thing, a capture also runs what it captures.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from inflight.runner.capture import Launch

aten = torch.ops.aten
_HOST_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.item.default}
_SIZED_BY_CONTENTS = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default}


class Moved(AssertionError):
    """A replay reads or writes memory that was freed after the capture."""


class _Address:
    """A tensor that the capture did not make, by its memory."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = StorageWeakRef(storage)
        self._pointer = storage.data_ptr()
        self._dtype = tensor.dtype
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        if 0 in self._place[1]:  # its contents are not read
            return torch.empty(self._place[1], dtype=self._dtype)
        storage = None if self._storage.expired() else torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.data_ptr() != self._pointer:
            raise Moved(f"a graph uses a tensor of shape {list(self._place[1])} at {self._pointer:#x}, which is gone")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._place)


class _Recorder(TorchDispatchMode):
    """Runs operations and kernels, and keeps them.

    Args:
        refusal: message of the error that an operation which reads a tensor on the host gets.
    """

    def __init__(self, refusal: str = "operation not permitted when stream is capturing") -> None:
        super().__init__()
        self.refusal = refusal
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[tuple[int, Tensor]]]] = []
        self._own: set[int] = set()
        self._in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_kernel:
            return func(*args, **(kwargs or {}))
        if func in _HOST_READS:
            raise RuntimeError(f"{self.refusal}: {func}")
        indices = args[1] if func in (aten.index.Tensor, aten.index_put_.default) else ()
        if func in _SIZED_BY_CONTENTS or any(index is not None and index.dtype == torch.bool for index in indices):
            raise RuntimeError(f"{self.refusal}: {func}")
        return self._record(func, args, kwargs or {})

    def launch(self, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A kernel reads tensors when it runs; nothing in it is an operation of torch."""
        self._in_kernel = True
        try:
            return self._record(kernel, args, kwargs)
        finally:
            self._in_kernel = False

    def _record(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        kept = tree_map_only(Tensor, self._reference, (args, kwargs))
        result = func(*args, **kwargs)
        made = [
            (place, leaf)
            for place, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor) and _memory(leaf) not in given
        ]
        self._own.update(_memory(leaf) for _, leaf in made)
        self.calls.append((func, *kept, made))
        return result

    def _reference(self, tensor: Tensor) -> Tensor | _Address:
        return tensor if _memory(tensor) in self._own else _Address(tensor)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class FakeGraph:
    """Implements `runner.graphs.Graph`."""

    def __init__(self, recorder: _Recorder, outputs: tuple[Tensor, ...], capturer: FakeCapturer) -> None:
        self.outputs = outputs
        self.replays = 0
        self._calls = recorder.calls
        self._capturer = capturer

    @torch.inference_mode()
    def replay(self) -> None:
        for other in self._capturer.graphs:
            if other is not self:
                for output in other.outputs:
                    output.fill_(float("nan") if output.is_floating_point() else 2**30)
        self.replays += 1
        for func, args, kwargs, made in self._calls:
            args, kwargs = tree_map_only(_Address, _Address.tensor, (args, kwargs))
            leaves = tree_leaves(func(*args, **kwargs))
            for place, tensor in made:
                tensor.copy_(leaves[place])


class FakeCapturer:
    """Implements `runner.graphs.Capturer`."""

    def __init__(self) -> None:
        self._graphs: list[weakref.ref[FakeGraph]] = []
        self.warm_ups = 0

    @property
    def graphs(self) -> list[FakeGraph]:
        """The graphs still referenced, in order of their capture."""
        return [graph for ref in self._graphs if (graph := ref()) is not None]

    def warm_up(self, launch: Launch) -> None:
        self.warm_ups += 1
        launch()
        watch = _Recorder("called a synchronizing CUDA operation")
        with watch, _active(watch):
            launch()

    def capture(self, launch: Launch, beside: Any) -> FakeGraph:
        recorder = _Recorder()
        assert beside is None if not self.graphs else beside in self.graphs, "graphs that are kept share their memory"
        with recorder, _active(recorder):
            outputs = launch()
        graph = FakeGraph(recorder, outputs, self)
        self._graphs.append(weakref.ref(graph))
        return graph


_recorder: _Recorder | None = None


@contextlib.contextmanager
def _active(recorder: _Recorder) -> Iterator[None]:
    global _recorder
    _recorder = recorder
    reads = ("tolist", "numpy")  # torch dispatches no operation for these reads by the host
    for name in reads:
        setattr(Tensor, name, _outside_of_operations(recorder, getattr(Tensor, name)))
    try:
        yield
    finally:
        _recorder = None
        for name in reads:
            delattr(Tensor, name)


def _outside_of_operations(recorder: _Recorder, read: Callable[..., Any]) -> Callable[..., Any]:
    def checked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not recorder._in_kernel:
            raise RuntimeError(f"{recorder.refusal}: {read.__name__}")
        return read(tensor, *args, **kwargs)

    return checked


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one kernel: a replay repeats all of its operations on its tensors."""

    @functools.wraps(function)
    def launched(*args: Any, **kwargs: Any) -> Any:
        if _recorder is None or _recorder._in_kernel:
            return function(*args, **kwargs)
        return _recorder.launch(function, args, kwargs)

    return launched
