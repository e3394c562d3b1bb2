"""Data that travels with a request from the frontend to the runner; the scheduler does not read it.  No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from inflight.engine.pooling import Pooling

__all__ = ["Attached", "RequestChoice", "attach_choices"]


class Attached(msgspec.Struct, array_like=True, frozen=True):
    """Plain, serialisable data.  Policies, listeners, step hooks and replay read it; a feature adds a field.

    Attributes:
        rope_length: sequence length that a length-dependent rotary embedding is chosen by (`rope_scaling.py`); 0: the
            checkpoint has none.
        traced: the frontend makes spans of the request (`request_times.py`).
        pooling: the request is for a vector, not for text.
    """

    rope_length: int = 0
    traced: bool = False
    pooling: Pooling | None = None


class RequestChoice(Protocol):
    """A choice that a checkpoint makes for each request on arrival; a step hook reads it in `Attached`."""

    def attach(self, attached: Attached, num_prompt_tokens: int, max_tokens: int) -> Attached:
        """`attached` with the choice for a request of these lengths."""

    def salt(self, attached: Attached) -> str:
        """Equal for two requests if equal tokens have the same KV in both; other requests never share a prefix."""


def attach_choices(
    choices: Sequence[RequestChoice], num_prompt_tokens: int, max_tokens: int, attached: Attached | None = None
) -> Attached:
    """`attached` with all choices for a request of these lengths."""
    attached = attached or Attached()
    for choice in choices:
        attached = choice.attach(attached, num_prompt_tokens, max_tokens)
    return attached
