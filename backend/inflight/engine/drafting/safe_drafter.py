"""A drafter that raises costs its drafts and nothing else: no answer depends on them."""

from __future__ import annotations

import logging
from weakref import WeakSet

from inflight.engine.drafting.drafter import Drafter
from inflight.engine.request import Request

__all__ = ["observed", "proposed"]

_log = logging.getLogger(__name__)
_reported: WeakSet[Drafter] = WeakSet()


def proposed(drafter: Drafter, request: Request, num_unknown: int, limit: int) -> list[int]:
    """What `Drafter.propose` returns, at most `limit` tokens; nothing if it raises."""
    try:
        return list(drafter.propose(request, num_unknown, limit))[:limit]
    except Exception:
        _report(drafter)
        return []


def observed(drafter: Drafter, request: Request, num_drafts: int, num_accepted: int) -> None:
    """`Drafter.observe`."""
    try:
        drafter.observe(request, num_drafts, num_accepted)
    except Exception:
        _report(drafter)


def _report(drafter: Drafter) -> None:
    """Once: it may be asked for every row of every step."""
    if drafter not in _reported:
        _reported.add(drafter)
        _log.exception("%s raised: no drafts where it does", type(drafter).__name__)
