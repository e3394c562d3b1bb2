"""Tests that share a server run in one process."""

from __future__ import annotations

import pytest


def test_the_tests_of_a_group_stay_in_one_worker(request: pytest.FixtureRequest) -> None:
    """In two workers they would start two servers."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("no pytest-xdist with --dist loadgroup")
    assert request.node.nodeid.endswith("@e2e-models"), "pytest-xdist has lost its groups: does it know this pytest?"
