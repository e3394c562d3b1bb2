"""vLLM's `stop_reason` of a choice."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["shown_stop_reason"]


def shown_stop_reason(found: str | int | None, stop_token_ids: Sequence[int] | None) -> str | int | None:
    """The stop string, or the one of `stop_token_ids`, that ended an answer; None for the model's own end.

    Args:
        found: what the backend names, which can be the end of sequence.
        stop_token_ids: of the request.
    """
    return found if isinstance(found, str) or found in (stop_token_ids or ()) else None
