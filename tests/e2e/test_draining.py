"""Draining through the real server: on request, by SIGTERM to the stub, on unload, reload and the server's end."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc as grpcclient
from fake_repository import FAKE_CONFIG, fake_options
from frontend_rig import write_orders
from model_entries import killed_at_the_end, load, write_entry
from processes_of import model_processes, stubs
from wire import wait_for

from inflight.frontend.lifecycle.instance_registry import states_of
from inflight_client import Client, RetryPolicy, UnavailableError
from inflight_tools.admin import grpc_metadata
from inflight_tools.launcher import TritonServer
from inflight_tools.processes import session_members

ONCE = RetryPolicy(max_attempts=1)
KEY = "a-key-of-the-test"
KEY_HEADERS = grpc_metadata(KEY)
PROMPT = "the list of names"
MODELS = ["asked", "signalled", "unloaded", "reloaded", "stopped"]
SLOW, HELD = "delay=0.05", "hold=3"
DRAIN_SECONDS = {"asked": 4.0, "unloaded": 0.5, "reloaded": 0.5}  # of models whose requests outlive them


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Orders for the engines."""
    return tmp_path_factory.mktemp("control") / "control.json"


@pytest.fixture
def release(control: Path) -> Iterator[Callable[[], None]]:
    """Lets the requests go on that are held (`HELD`)."""

    def go() -> None:
        write_orders(control, go="")

    yield go
    control.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def server(triton_installed: None, control: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """With a model for each test, named after it, since a drained instance takes no more requests."""
    folder = tmp_path_factory.mktemp("draining")
    repository, variables = folder / "repository", {"FAKE_ENGINE_CONTROL": str(control)}
    for name in MODELS:
        timeout, options = DRAIN_SECONDS.get(name, 60.0), fake_options(folder, variables) | {"spare_engine": False}
        write_entry(repository, name, FAKE_CONFIG, **options, drain_timeout=timeout)
    how: dict[str, Any] = {"model_control_mode": "explicit", "load_models": MODELS, "exit_timeout": 20}
    with killed_at_the_end(TritonServer(repository, admin_key=KEY, **how)) as server:
        yield server


def states(server: TritonServer, model: str) -> list[str]:
    """States of the living instances of a model."""
    return [entry.state for stub in stubs(server, model) for entry in states_of(stub)]


class Reading:
    """A stream that is read in a thread, with orders for the engine."""

    def __init__(self, server: TritonServer, model: str, protocol: str, tokens: int, orders: str = SLOW) -> None:
        url = server.grpc_address if protocol == "grpc" else server.http_address
        self.text, self.error = "", ""
        self.began = threading.Event()
        self._client = Client(url, protocol=protocol, model=model, retries=ONCE)  # type: ignore[arg-type]
        self._stream = self._client.stream(PROMPT, max_tokens=tokens, tenant=orders)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.began.wait(30)

    def _read(self) -> None:
        try:
            for chunk in self._stream:
                self.text += chunk.text
                self.began.set()
        except UnavailableError as error:
            self.error = error.message
        self.began.set()
        self._client.close()  # a server that stops waits for its clients' connections

    def wait(self) -> Reading:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self


def control_of(server: TritonServer, model: str, question: str) -> dict[str, Any]:
    url = f"http://{server.http_address}/v2/models/{model}/generate"
    body = json.dumps({"control": question, "admin_key": KEY}).encode()
    try:
        with urllib.request.urlopen(url, body, timeout=30) as response:
            return json.loads(json.loads(response.read())["text_output"])
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read()) from None


def refused(server: TritonServer, model: str) -> str:
    with Client(server.grpc_address, model=model, retries=ONCE) as client, pytest.raises(UnavailableError) as caught:
        client.generate(PROMPT, max_tokens=1)
    return caught.value.message


def test_a_control_request_drains_and_tells_how_it_went(server: TritonServer, release: Callable[[], None]) -> None:
    short, long = Reading(server, "asked", "grpc", 8, HELD), Reading(server, "asked", "http", 2000)
    answer: dict[str, Any] = {}
    asking = threading.Thread(target=lambda: answer.update(control_of(server, "asked", "drain")))
    asking.start()
    wait_for(lambda: states(server, "asked") == ["draining"])
    release()
    assert "is draining: it takes no new requests; retry in " in refused(server, "asked")
    asking.join(30)
    assert (answer["finished"], answer["ended"]) == (1, 1)
    assert not short.wait().error
    assert "did not finish within drain_timeout=4 s" in long.wait().error and long.text
    assert control_of(server, "asked", "stats")["state"] == "drained"


def test_sigterm_to_every_process_of_the_model_drains_and_costs_no_token(
    server: TritonServer, release: Callable[[], None]
) -> None:
    """As by a service manager that signals a whole control group."""
    streams = [Reading(server, "signalled", protocol, 12, HELD) for protocol in ("grpc", "http")]
    for process in model_processes(server, "signalled"):
        process.terminate()
    wait_for(lambda: "serving" not in states(server, "signalled"))
    assert "is draining" in refused(server, "signalled")
    release()
    assert [stream.wait().error for stream in streams] == ["", ""]
    wait_for(lambda: states(server, "signalled") == ["drained"])


def test_an_unload_drains(server: TritonServer) -> None:
    stream = Reading(server, "unloaded", "grpc", 2000)
    with grpcclient.InferenceServerClient(server.grpc_address) as control:
        control.unload_model("unloaded", headers=KEY_HEADERS)
    assert "drain_timeout=0.5 s" in stream.wait().error and stream.text


def test_a_reload_ends_the_requests_of_the_instance_that_it_replaces(server: TritonServer) -> None:
    stream = Reading(server, "reloaded", "grpc", 2000)
    config = {
        "backend": "inflight",
        "instance_group": [{"kind": "KIND_CPU"}],
        "parameters": {"x": {"string_value": "1"}},
    }
    load(server, "reloaded", config=json.dumps(config))
    assert sorted(states(server, "reloaded")) == ["serving", "serving"] and not stream.error
    processes = [psutil.Process(stub) for stub in stubs(server, "reloaded")]
    assert [process.net_connections("inet") for process in processes] == [[], []], "a stub holds no port of the server"
    assert max(process.num_fds() for process in processes) < 60, "nor the 130 sockets of its threads"
    new = Reading(server, "reloaded", "grpc", 10)  # the new instance notices that it serves
    assert "drain_timeout=0.5 s" in stream.wait().error
    assert not new.wait().error
    wait_for(lambda: states(server, "reloaded") == ["serving"])


def test_the_launcher_drains_before_it_stops_and_leaves_nothing(
    server: TritonServer, release: Callable[[], None]
) -> None:
    """Runs last, because it stops the server."""
    assert server.process is not None
    session, runtime_dir = server.process.pid, server._runtime_dir
    streams = [Reading(server, "stopped", protocol, 20, HELD) for protocol in ("grpc", "http")]
    with ThreadPoolExecutor() as threads:
        stopping = threads.submit(server.stop)
        try:
            wait_for(lambda: states(server, "stopped") == ["draining"])
        finally:
            release()
        stopping.result()
    assert [stream.wait().error for stream in streams] == ["", ""]
    deadline = time.monotonic() + 20  # the last one was killed, and takes a moment to be gone
    while session_members(session):
        assert time.monotonic() < deadline, session_members(session)
        time.sleep(0.05)
    assert not list(Path("/dev/shm").glob(server.shm_prefix + "*"))
    assert runtime_dir is not None and not runtime_dir.exists()
    assert "drained" in server.log_text(), "the log stays"
    server.stop()  # is safe to repeat
