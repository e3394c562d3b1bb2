"""Contains a drafter's exceptions: only its drafts are lost, and no output depends on them.  No torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from inflight.engine.drafting.drafter import Drafter
from inflight.engine.request import Request
from inflight.panics import is_panic

__all__ = ["SafeDrafter"]

_log = logging.getLogger(__name__)


class SafeDrafter:
    """Implements `Drafter`: `inner`, without its exceptions and panics.  The first one is logged."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self._reported = False

    @property
    def active(self) -> bool:
        return self.inner.active

    def propose(self, request: Request, num_unknown: int, limit: int) -> Sequence[int]:
        try:
            return self.inner.propose(request, num_unknown, limit)
        except BaseException as error:
            self._report(error)
            return ()

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        try:
            self.inner.observe(request, num_drafts, num_accepted)
        except BaseException as error:
            self._report(error)

    def _report(self, error: BaseException) -> None:
        """Log once: the drafter can raise for every row of every step.  Raises what is no fault of a drafter."""
        if not (isinstance(error, Exception) or is_panic(error)):
            raise error
        if not self._reported:
            self._reported = True
            _log.exception("%s raised: requests go without drafts where it does", type(self.inner).__name__)
