"""The last steps of an engine that gets no more work for now.  No torch."""

from __future__ import annotations

from inflight.engine.core import EngineCore

__all__ = ["collect_last_steps"]


def collect_last_steps(core: EngineCore) -> None:
    """End what still runs, and collect the steps that were launched: for KV tiers.

    They get what a request has computed once no step in flight may write it, and nothing else would collect a step that
    was launched ahead of the token that ended the last request.
    """
    for request_id in list(core.live_ids):
        core.abort(request_id)
    while core.has_work:
        core.step()
