"""What goes wrong while loading."""

from __future__ import annotations

__all__ = ["LoadError"]


class LoadError(RuntimeError):
    """The checkpoint cannot be served on this machine; the message says what to change."""
