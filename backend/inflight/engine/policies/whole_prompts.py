"""The budget of encoders, whose tokens look both ways: a prompt is computed in one step.  No torch."""

from __future__ import annotations

from inflight.engine.request import Request

__all__ = ["WholePrompts"]


class WholePrompts:
    """All the tokens that a prompt misses, or none.

    The first in line is never passed over: a step holds a prompt of `max_model_len` (checked at load), and what runs
    takes no tokens of another step.  Shorter ones behind it fill the step.
    """

    def grant(self, request: Request, missing: int, limit: int) -> int:
        return missing if missing <= limit else 0
