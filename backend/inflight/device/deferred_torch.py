"""`import torch` without the parts that only compilers and tracers use, until something uses them.  No torch here.

`torch._meta_registrations` (shapes of results without data, for a thousand operators), `torch.export` and three smaller
packages take more than a third of the import, and an engine that runs kept weights never needs them.  Where they
belong are placeholders: an attribute of one, or the first import of a package that traces (transformers does), imports
what they stand for, as `import torch` would have done.  A torch that was built without CUDA imports no bindings for
CUDA either, which another package may have installed.

torch promises nothing about the order of its own imports, so this is done for the versions alone that it was tried
with; other versions are imported whole.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

__all__ = ["complete_torch", "import_torch"]

_TRIED = ("2.13.0",)
_PARTS = ("torch._meta_registrations", "torch.distributions", "torch.export", "torch.masked", "torch.quantization")
_CUDA = "cuda.bindings"
_TRACING = ("transformers", "triton", "torch._dynamo", "torch._inductor", "torch.onnx")
_OF_PLACEHOLDERS: list[str] = []  # a path, by which `_BeforeUse` knows imports from within a part


class _Placeholder(ModuleType):
    __path__ = _OF_PLACEHOLDERS

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            being_imported = _FINDER not in sys.meta_path
            asked_of_every_module = name.startswith("__") and name != "__all__"  # by `inspect`, for one
            if being_imported or asked_of_every_module:
                raise AttributeError(name)
            complete_torch()
        # A module that imported the placeholder keeps it.  Another thread may be half through the import: wait.
        return getattr(importlib.import_module(self.__name__), name)


class _BeforeUse(MetaPathFinder):
    """Completes torch before a package that traces, or a module of a part that was left out, is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_in_part = path is _OF_PLACEHOLDERS
        if not is_in_part and name not in _TRACING:
            return None
        complete_torch()
        # If the completion has imported it, a second import would make its classes again; but for a name that is in
        # sys.modules now, Python would take that module's own spec instead of this one.
        if (module := sys.modules.pop(name, None)) is not None:
            return ModuleSpec(name, _Imported(module))
        return importlib.util.find_spec(name) if is_in_part else None


class _Imported(Loader):
    """Of a module that was imported while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self._module  # from where the import takes its result


_PLACEHOLDERS = {name: _Placeholder(name) for name in _PARTS}
_FINDER = _BeforeUse()
_LOCK = threading.Lock()  # not held while modules are imported: the import system's own locks find deadlocks
_completing: set[int] = set()  # threads


def import_torch() -> None:
    """The first import of torch in a process; without these parts, if this version can do without them."""
    try:
        number, _, build = version("torch").partition("+")
    except PackageNotFoundError:
        number = build = ""
    if number not in _TRIED or "torch" in sys.modules:
        importlib.import_module("torch")
        return
    sys.modules |= _PLACEHOLDERS
    with _without(_CUDA) if build == "cpu" else contextlib.nullcontext():
        importlib.import_module("torch")
    sys.meta_path.insert(0, _FINDER)


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """Within this, a module that has not been imported cannot be: as if it were not installed."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # what `import` takes for a refusal
    try:
        yield
    finally:
        del sys.modules[name]


def complete_torch() -> None:
    """Import what was left out, if anything was.  Other threads that need it wait."""
    thread = threading.get_ident()
    if _FINDER not in sys.meta_path or thread in _completing:  # a part imports what traces
        return
    with _LOCK:
        for name, placeholder in _PLACEHOLDERS.items():
            if sys.modules.get(name) is placeholder:
                del sys.modules[name]
    _completing.add(thread)
    try:
        for name in _PARTS:
            importlib.import_module(name)
    finally:
        _completing.remove(thread)
    with contextlib.suppress(ValueError):  # another thread was first
        sys.meta_path.remove(_FINDER)
