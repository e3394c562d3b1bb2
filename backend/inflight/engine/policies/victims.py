"""Which request gives up its blocks when a running request needs one and none is left.

No answer leads to livelock: a preempted request returns only when there are blocks for all of
its tokens, which is more than it gave up, so others have ended or given way in between; and the last
running request always finds room, because the pool holds one request of any length.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.config import EngineConfig
from inflight.engine.policies.base import VictimPolicy
from inflight.engine.policies.defaults import last_in_order
from inflight.engine.request import Request

__all__ = ["VICTIM_POLICIES", "least_preempted", "longest", "lowest_priority", "make_victim"]


def lowest_priority(candidates: Sequence[Request]) -> Request:
    """The latest arrival of the least urgent class, however long it has waited."""
    return max(candidates, key=lambda request: (request.priority, request.arrival_time, request.request_id))


def longest(candidates: Sequence[Request]) -> Request:
    """The request with the most tokens: few requests are preempted, but long ones finish late."""
    return max(candidates, key=lambda request: (request.num_tokens, request.arrival_time, request.request_id))


def least_preempted(candidates: Sequence[Request]) -> Request:
    """The request that was preempted least often, then the latest arrival: preemptions are spread."""
    return max(candidates, key=lambda r: (-r.num_preemptions, r.priority, r.arrival_time, r.request_id))


VICTIM_POLICIES: dict[str, VictimPolicy] = {
    "last": last_in_order,
    "lowest_priority": lowest_priority,
    "longest": longest,
    "least_preempted": least_preempted,
}


def make_victim(config: EngineConfig) -> VictimPolicy:
    """The victim policy that `model.json` chooses."""
    return VICTIM_POLICIES[config.preemption_victim]
