"""The time that computing takes in the tests of KV tiers."""

from __future__ import annotations

import pytest

from inflight.engine.policies import tier_admission


@pytest.fixture
def half_a_millisecond_a_token(monkeypatch):
    """On the clock of these engines computing takes no time, and is never measured."""
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", 5e-4)
