"""Sizes in bytes as people read them."""

from __future__ import annotations

__all__ = ["format_bytes"]


def format_bytes(size: float) -> str:
    """Human-readable, such as `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
