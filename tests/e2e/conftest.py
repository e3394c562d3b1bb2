"""Fixtures for the tests that start a real tritonserver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight_tools.installation import LauncherError, TritonInstallation
from inflight_tools.launcher import TritonServer

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1] / "model_repository"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests, and keep them in one xdist worker, because they share a server."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.xdist_group("e2e"))


@pytest.fixture(scope="session")
def triton_installed() -> None:
    """Skip if there is no tritonserver to start."""
    try:
        TritonInstallation.find()
    except LauncherError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def server(triton_installed: None) -> Iterator[TritonServer]:
    """A tritonserver with the model `demo`, shared by all tests that do not change its models."""
    server = TritonServer(REPOSITORY, model_control_mode="explicit", load_models=["demo"], exit_timeout=5)
    with server:
        yield server
