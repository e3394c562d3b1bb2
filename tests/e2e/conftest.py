"""Fixtures for the tests that start a real tritonserver."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from guarded_entry import KEY, write_guarded
from model_entries import copy_entry, keep_weights, killed_at_the_end, loaded
from replicas import Fleet

from inflight_tools.installation import LauncherError, TritonInstallation
from inflight_tools.launcher import TritonServer

HERE = Path(__file__).parent
LOG_CHARACTERS = 6000  # of each server that a failure shows

# The modules of each pytest-xdist group.  A group runs in one process, whose modules share a tritonserver, and takes
# about as long as the other; that of the docs runs nightly.
GROUPS = {
    "e2e-docs": ("doc_snippets",),
    "e2e-demo": (
        "anthropic",
        "copied_backend",
        "demo",
        "failover",
        "fleet",
        "fleet_restarts",
        "gateway",
        "gateway_chat",
        "gateway_vectors",
        "hostile_clients",
        "monitoring",
        "openai_clients",
        "prometheus",
        "questions",
        "several_frontends",
        "step_trace",
        "structured_output",
        "tensorrt_llm_clients",
        "vllm_backend_clients",
    ),
    "e2e-models": (
        "adapters",
        "adapters_real_model",
        "draining",
        "frontend_fake_engine",
        "frontend_loads",
        "gguf_reload",
        "grouping",
        "handover",
        "handover_peer",
        "kept_chats",
        "kept_weights",
        "kubernetes",
        "kv_tiers",
        "latency",
        "memory",
        "opentelemetry",
        "pooling",
        "prefill_proxies",
        "replay",
        "scheduling",
        "serving",
        "soak",
        "stopping",
        "stored_checkpoints",
        "triton_frontend",
        "who_may_do_what",
    ),
}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests, and keep tests that share a server in one xdist worker."""
    group_of = {f"test_{module}": group for group, modules in GROUPS.items() for module in modules}
    for item in items:
        if HERE in item.path.parents:
            if item.path.stem not in group_of:
                raise pytest.UsageError(f"{item.path} is in no group: add it to GROUPS in {HERE / 'conftest.py'}")
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.xdist_group(group_of[item.path.stem]))


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
def keeping(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of servers that find the packed weights of the demo; of other checkpoints the first load leaves
    them."""
    cache = str(tmp_path_factory.mktemp("cache"))
    keep_weights(cache)
    return {"INFLIGHT_CACHE": cache}


@pytest.fixture(scope="package")
def triton(
    triton_installed: None, keeping: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A tritonserver without models: modules load their own (`model_entries.loaded`) and leave none behind.

    It ends with the last test of this folder: idle servers take a tenth of a core.
    """
    repository = tmp_path_factory.mktemp("models")
    copy_entry(repository, "demo")
    copy_entry(repository, "ensemble", spare_engine=False)
    env = {**keeping, "OTEL_BSP_SCHEDULE_DELAY": "100"}  # milliseconds until spans leave a stub
    with killed_at_the_end(TritonServer(repository, model_control_mode="explicit", env=env)) as server:
        yield server


@pytest.fixture(scope="package")
def server(triton: TritonServer) -> Iterator[TritonServer]:
    """The same server with the model `demo`, which no module changes."""
    with loaded(triton, "demo"):
        yield triton


@pytest.fixture(scope="package")
def guarded(
    triton_installed: None, keeping: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server that lets only callers with the key manage models, with the model `mine`."""
    repository = tmp_path_factory.mktemp("guarded")
    write_guarded(repository)
    options = {"model_control_mode": "explicit", "load_models": ["mine"], "admin_key": KEY, "env": keeping}
    with killed_at_the_end(TritonServer(repository, **options)) as server:
        yield server


@pytest.fixture(scope="package")
def fleet(server: TritonServer, keeping: dict[str, str]) -> Iterator[Fleet]:
    """The server of other modules, which no test disturbs, and one to be killed."""
    fleet = Fleet(2, server, keeping)
    yield fleet
    fleet.close()
