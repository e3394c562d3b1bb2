"""The error of what cannot be done."""

from __future__ import annotations

__all__ = ["Refused"]


class Refused(Exception):
    """The checkpoint cannot be quantized, or not with these options; the message says what to do instead."""
