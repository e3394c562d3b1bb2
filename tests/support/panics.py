"""A panic as PyO3 raises it."""

from __future__ import annotations

__all__ = ["Panic"]


class Panic(BaseException):
    """No `Exception`, and of a module without a file."""


Panic.__module__ = "pyo3_runtime"
