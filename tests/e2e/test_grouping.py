"""Tests that share servers run in one process."""

from __future__ import annotations

import pytest


def test_the_tests_of_this_folder_stay_in_one_worker(request: pytest.FixtureRequest) -> None:
    """Side by side they take each other's ports and time."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("no pytest-xdist with --dist loadgroup")
    assert request.node.nodeid.endswith("@e2e"), "pytest-xdist has lost its groups: does it know this pytest?"
