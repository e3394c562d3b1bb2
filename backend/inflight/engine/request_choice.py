"""The seam for what a checkpoint decides for each request on arrival.  No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inflight.engine.attached import Attached

__all__ = ["RequestChoice", "attach_choices"]


class RequestChoice(Protocol):
    """A choice that a checkpoint makes for each request on arrival; a step hook reads it in `Attached`."""

    def attach(self, attached: Attached, num_prompt_tokens: int, max_tokens: int) -> Attached:
        """`attached` with the choice for a request of these lengths."""

    def salt(self, attached: Attached) -> str:
        """Equal if equal tokens have the same KV in both requests, else they share no prefix; "": as with no choice."""


def attach_choices(
    choices: Sequence[RequestChoice], num_prompt_tokens: int, max_tokens: int, attached: Attached | None = None
) -> Attached:
    """`attached` with all choices for a request of these lengths."""
    attached = attached or Attached()
    for choice in choices:
        attached = choice.attach(attached, num_prompt_tokens, max_tokens)
    return attached
