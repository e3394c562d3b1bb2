"""A real tritonserver whose model follows a script: see `scripted_model.py`."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_entries import killed_at_the_end

from inflight_client import Client
from inflight_tools.installation import LauncherError, TritonInstallation
from inflight_tools.launcher import TritonServer

HERE = Path(__file__).parent
_CONFIG = 'backend: "python"\ninstance_group [{ kind: KIND_CPU count: 1 }]\n'


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One xdist worker for the tests that share the server."""
    for item in items:
        if HERE in item.path.parents and "scripted" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.xdist_group("client"))


@pytest.fixture(scope="package")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The server.  gRPC headers named `x-...` reach the model as request parameters."""
    try:
        TritonInstallation.find()
    except LauncherError as error:
        pytest.skip(str(error))
    repository = tmp_path_factory.mktemp("repository")
    for name in ("scripted", "unnamed"):
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(_CONFIG)
        shutil.copy(HERE / "scripted_model.py", version / "model.py")
    explicit: dict[str, Any] = {"model_control_mode": "explicit", "load_models": ["scripted"]}
    forward = ["--grpc-header-forward-pattern=x-.*"]
    with killed_at_the_end(TritonServer(repository, metrics_port=None, extra_args=forward, **explicit)) as server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def address(scripted: TritonServer, protocol: str) -> str:
    return scripted.grpc_address if protocol == "grpc" else scripted.http_address


@pytest.fixture
def client(address: str, protocol: str) -> Iterator[Client]:
    with Client(address, protocol=protocol, model="scripted") as client:  # type: ignore[arg-type]
        yield client


@pytest.fixture
def key() -> str:
    """Identifies the requests of a test."""
    return uuid.uuid4().hex


@pytest.fixture
def seen(scripted: TritonServer) -> Iterator[Callable[..., dict[str, Any]]]:
    """The model's record of a key, once `until` holds."""
    with Client(scripted.grpc_address, model="scripted") as observer:

        def look(key: str, until: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
            for _ in range(1000):
                report: dict[str, Any] = json.loads(observer.generate(json.dumps({"report": key})).text)
                if until(report):
                    return report
                time.sleep(0.02)
            raise AssertionError(f"the model saw only {report} under {key!r}")

        yield look


@pytest.fixture
def release(scripted: TritonServer) -> Callable[[str], None]:
    """Lets the held requests of a key go on."""

    def go(key: str) -> None:
        with Client(scripted.grpc_address, model="scripted") as client:
            client.generate(json.dumps({"report": key, "release": True}))

    return go
