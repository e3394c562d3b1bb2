"""What goes wrong while loading."""

from __future__ import annotations

__all__ = ["LoadError", "in_one_line"]


class LoadError(RuntimeError):
    """The checkpoint cannot be served on this machine; the message says what to change."""


def in_one_line(error: Exception) -> str:
    """A library's error: its first line, and the second if the first only introduces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
