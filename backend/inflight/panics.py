"""Panics of libraries in Rust.  No torch."""

from __future__ import annotations

__all__ = ["is_panic"]


def is_panic(error: BaseException) -> bool:
    """Whether PyO3 raised it for a panic: it is no `Exception`, and of a module without a file."""
    return type(error).__module__ == "pyo3_runtime"
