"""Tells the drafter what steps cost and which requests have ended.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.drafting.adaptive_drafter import ThriftyDrafter
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, BudgetPolicy, NotYet
from inflight.engine.request import Request
from inflight.engine.step import SchedulerOutput

__all__ = ["DraftedAdmission", "DraftedBudget"]


class DraftedAdmission:
    """Implements `AdmissionPolicy`: `inner`, whose ended requests the drafter forgets."""

    def __init__(self, inner: AdmissionPolicy, drafter: ThriftyDrafter) -> None:
        self._inner = inner
        self._drafter = drafter
        self.begin = inner.begin
        self.admitted = inner.admitted
        self.left = inner.left

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        return self._inner.admits(request, prefix, running, pool)

    def ended(self, request: Request) -> None:
        self._drafter.ended(request)
        self._inner.ended(request)


class DraftedBudget:
    """Implements `BudgetPolicy`: `inner`, while the drafter learns what draft tokens cost."""

    def __init__(self, inner: BudgetPolicy, drafter: ThriftyDrafter) -> None:
        self._inner = inner
        self._drafter = drafter
        self.grant = inner.grant

    def begin(self, running: Sequence[Request]) -> None:
        self._drafter.begin(running)
        self._inner.begin(running)

    def observe(self, out: SchedulerOutput, seconds: float) -> None:
        num_drafts = sum(map(len, out.draft_token_ids.values()))
        only_decodes = out.num_tokens - num_drafts == len(out.slots)
        self._drafter.step_took(len(out.slots) if only_decodes else 0, num_drafts, seconds)
        self._inner.observe(out, seconds)
