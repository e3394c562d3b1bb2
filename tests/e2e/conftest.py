"""Fixtures for the tests that start a real tritonserver."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from inflight_tools.installation import LauncherError, TritonInstallation
from inflight_tools.launcher import TritonServer

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1] / "model_repository"
LOG_CHARACTERS = 6000  # of each server that a failure shows


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests, and keep them in one xdist worker, because they share a server."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.xdist_group("e2e"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows the end of the log of each tritonserver that the test was given."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            servers = getattr(value, "servers", value)
            for server in servers if isinstance(servers, list | tuple) else [servers]:
                if isinstance(server, TritonServer):
                    report.sections.append((f"log of the tritonserver {name!r}", server.log_text()[-LOG_CHARACTERS:]))
    return report


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
