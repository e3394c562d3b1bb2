"""The one error of this room.  No torch."""

from __future__ import annotations

__all__ = ["AdapterError"]


class AdapterError(ValueError):
    """An adapter that cannot be used; the message is one line that says what came, what is allowed, and the fix."""
