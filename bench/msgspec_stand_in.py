"""As much of msgspec as SamplingParams needs, for a machine that has only torch, triton and numpy.

Call `install()` before importing `inflight`; it does nothing if msgspec is installed.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["install"]


class _Struct:
    """Subclasses become dataclasses; msgspec's options only affect serialisation."""

    def __init_subclass__(cls, **options: Any) -> None:
        for name, default in list(vars(cls).items()):
            if isinstance(default, (list, dict)) and not name.startswith("__"):
                setattr(cls, name, dataclasses.field(default_factory=type(default)))
        dataclasses.dataclass(cls)


def _codec(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(encode=None, decode=None)


def install() -> None:
    with suppress(ImportError):
        import msgspec  # noqa: F401

        return
    module = ModuleType("msgspec")
    module.Struct = _Struct  # type: ignore[attr-defined]
    module.msgpack = SimpleNamespace(Encoder=_codec, Decoder=_codec)  # type: ignore[attr-defined]
    sys.modules["msgspec"] = module
