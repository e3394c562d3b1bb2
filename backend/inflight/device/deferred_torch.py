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
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

__all__ = ["complete_torch", "import_torch"]

_TRIED = ("2.13.0",)
_PARTS = ("torch._meta_registrations", "torch.distributions", "torch.export", "torch.masked", "torch.quantization")
_CUDA = "cuda.bindings"
_TRACING = ("transformers", "triton", "torch._dynamo", "torch._inductor", "torch.onnx")


class _Placeholder(ModuleType):
    def __getattr__(self, name: str) -> Any:
        real = sys.modules.get(self.__name__, self)
        if real is not self:  # a module that imported the placeholder keeps it
            return getattr(real, name)
        being_imported = _FINDER not in sys.meta_path
        asked_of_every_module = name.startswith("__") and name != "__path__"  # by `inspect`, for one
        if being_imported or asked_of_every_module:
            raise AttributeError(name)
        complete_torch()
        return getattr(sys.modules[self.__name__], name)


class _BeforeTracing(MetaPathFinder):
    """Finds nothing, but completes torch before a package that traces is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _TRACING:
            complete_torch()
        return None


_PLACEHOLDERS = {name: _Placeholder(name) for name in _PARTS}
_FINDER = _BeforeTracing()
_LOCK = threading.RLock()


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
    with _LOCK:
        left_out = [name for name, placeholder in _PLACEHOLDERS.items() if sys.modules.get(name) is placeholder]
        for name in left_out:
            del sys.modules[name]
        for name in left_out:
            importlib.import_module(name)
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
