"""bench/kv_tiers.py: which gaps between tokens are those beside a load."""

from __future__ import annotations

import kv_tiers

WINDOW = [(0.0, 1.0), (1.0, 2.0), (2.0, 9.0), (9.0, 10.0), (10.0, 11.0)]
OWN = [(2.0, 9.0), (9.0, 10.0)]  # the steps of the request's own tokens


def test_gaps_apart_from_its_own_steps() -> None:
    assert kv_tiers.apart(WINDOW, OWN, has_lost=False) == [(0.0, 1.0), (1.0, 2.0), (10.0, 11.0)]
    assert kv_tiers.apart(WINDOW, [], has_lost=False) == WINDOW


def test_a_step_that_computes_what_a_tier_has_lost_counts() -> None:
    assert kv_tiers.apart(WINDOW, OWN, has_lost=True) == [(0.0, 1.0), (1.0, 2.0), (2.0, 9.0), (10.0, 11.0)]
