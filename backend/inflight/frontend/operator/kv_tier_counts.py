"""Increments of the metrics of KV tiers.  No torch."""

from __future__ import annotations

from typing import Any

from inflight.engine.deltas import TierTotals

__all__ = ["new_counts"]

_COUNTERS = {
    "inflight_kv_tier_load_seconds_sum": "load_seconds_total",
    "inflight_kv_tier_load_seconds_count": "loaded_total",
    "inflight_kv_tier_stored_total": "stored_total",
    "inflight_kv_tier_dropped_total": "dropped_total",
}


def new_counts(before: TierTotals | None, now: TierTotals) -> dict[Any, float]:
    """By metric, or (metric, tier, ...): what came since `before`; a new engine process counts from 0."""
    old, new = (_totals(before) if before else {}), _totals(now)
    return {key: value - old.get(key, 0) if value >= old.get(key, 0) else value for key, value in new.items()}


def _totals(totals: TierTotals) -> dict[Any, float]:
    found: dict[Any, float] = {
        "vllm:external_prefix_cache_queries_total": totals.queries_total,
        "vllm:external_prefix_cache_hits_total": totals.hits_total,
    }
    for tier in totals.tiers:
        found |= {(name, tier.tier): getattr(tier, field) for name, field in _COUNTERS.items()}
        found |= {("inflight_kv_tier_errors_total", tier.tier, why): count for why, count in tier.errors_total.items()}
    return found
