"""A real tritonserver with the real model, and a gateway, for clients that run in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapters import make_adapter
from model_entries import write_entry

from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.gateway_process import GatewayProcess
from inflight_tools.installation import LauncherError, TritonInstallation
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports
from tests.clients.catalogue import ADAPTER, KEY


@pytest.fixture(scope="session")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A tritonserver with the model `smollm2`, and an adapter of it."""
    try:
        TritonInstallation.find()
    except LauncherError as error:
        pytest.skip(str(error))
    repository = tmp_path_factory.mktemp("models")
    options = {"kv_cache_memory": "384MiB", "max_model_len": 4096, "enable_lora": True}
    entry = write_entry(repository, "smollm2", model=str(smollm2), **options)
    adapter = make_adapter(tmp_path_factory.mktemp("adapters") / ADAPTER, str(smollm2), ("q_proj", "v_proj"), seed=1)
    (entry / "1" / "multi_lora.json").write_text(json.dumps({ADAPTER: str(adapter.path)}))
    with TritonServer(repository, exit_timeout=5) as server:
        yield server


@pytest.fixture(scope="session")
def gateway(server: TritonServer) -> Iterator[str]:
    """Its `base_url`."""
    (port,) = pick_ports(1)
    process = GatewayProcess(GatewayOptions(api_keys=(KEY,)), ServerOptions(port=port, exit_timeout=2))
    process.start(server.grpc_address)
    yield process.url
    process.stop()
