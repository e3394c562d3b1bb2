"""What travels with a request from the frontend to the runner, unread by the scheduler.  No torch."""

from __future__ import annotations

import msgspec

__all__ = ["Attached"]


class Attached(msgspec.Struct, array_like=True, frozen=True):
    """Plain data that serialises.  Policies, listeners, step hooks and replay read it; a feature adds a field.

    Attributes:
        rope_length: sequence length that a length-dependent rotary embedding is chosen by (`rope_scaling.py`); 0:
            there is no choice.
    """

    rope_length: int = 0
