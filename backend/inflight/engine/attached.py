"""Data that travels with a request from the frontend to the runner; the scheduler does not read it.  No torch."""

from __future__ import annotations

import msgspec

from inflight.engine.adapter import AdapterRef
from inflight.engine.pooling import Pooling

__all__ = ["Attached"]


class Attached(msgspec.Struct, array_like=True, frozen=True):
    """Plain, serialisable data.  Policies, listeners, step hooks and replay read it; a feature adds a field.

    Attributes:
        rope_length: sequence length that a length-dependent rotary embedding is chosen by (`rope_scaling.py`); 0: the
            checkpoint has none.
        traced: the frontend makes spans of the request (`request_times.py`).
        pooling: the request is for a vector, not for text.
        adapter: its rows are computed with this LoRA adapter; None: with the checkpoint alone.
        second_start: of a pair of texts, the first token that belongs to the second one; 0: the tokens are of one text.
        resumed: its client gave its output so far: another server has begun it, and may still write its KV.
    """

    rope_length: int = 0
    traced: bool = False
    pooling: Pooling | None = None
    adapter: AdapterRef | None = None
    second_start: int = 0
    resumed: bool = False
