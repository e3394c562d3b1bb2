"""Draining through the real server: on request, by SIGTERM to the stub, on unload, reload and the server's end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc as grpcclient
from fake_repository import write_repository
from processes_of import stubs
from wire import wait_for

from inflight.frontend.lifecycle.instance_registry import children_of, states_of
from inflight_client import Client, RetryPolicy, UnavailableError
from inflight_tools.admin import grpc_metadata
from inflight_tools.launcher import TritonServer
from inflight_tools.processes import session_members

ONCE = RetryPolicy(max_attempts=1)
KEY = "a-key-of-the-test"
KEY_HEADERS = grpc_metadata(KEY)
PROMPT = "the list of names"


@pytest.fixture(scope="module")
def fake(triton_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = write_repository(tmp_path_factory.mktemp("draining"), drain_timeout=2.0)
    with TritonServer(
        repository,
        model_control_mode="explicit",
        load_models=["fake"],
        exit_timeout=20,
        admin_key=KEY,
    ) as server:
        yield server


@pytest.fixture
def loaded(fake: TritonServer) -> Iterator[TritonServer]:
    """The server with a fresh instance of its model."""
    control = grpcclient.InferenceServerClient(fake.grpc_address)
    if states(fake) != ["serving"]:
        control.unload_model("fake", headers=KEY_HEADERS)
        wait_for(lambda: not states(fake))
        control.load_model("fake", headers=KEY_HEADERS)
    yield fake
    control.close()


def states(server: TritonServer) -> list[str]:
    """States of the living model instances."""
    assert server.process is not None
    return [entry.state for pid in children_of(server.process.pid) for entry in states_of(pid)]


class Reading:
    """A stream that is read in a thread; `slow` makes the engine take that long for each of its tokens."""

    def __init__(self, server: TritonServer, protocol: str, tokens: int, slow: float) -> None:
        url = server.grpc_address if protocol == "grpc" else server.http_address
        self.text, self.error = "", ""
        self.began = threading.Event()
        self._client = Client(url, protocol=protocol, model="fake", retries=ONCE)  # type: ignore[arg-type]
        self._stream = self._client.stream(PROMPT, max_tokens=tokens, tenant=f"delay={slow}")
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

    def wait(self) -> Reading:
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._client.close()
        return self


def control_of(server: TritonServer, question: str) -> dict[str, Any]:
    url = f"http://{server.http_address}/v2/models/fake/generate"
    body = json.dumps({"control": question, "admin_key": KEY}).encode()
    try:
        with urllib.request.urlopen(url, body, timeout=30) as response:
            return json.loads(json.loads(response.read())["text_output"])
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read()) from None


def refused(server: TritonServer) -> str:
    with Client(server.grpc_address, model="fake", retries=ONCE) as client, pytest.raises(UnavailableError) as caught:
        client.generate(PROMPT, max_tokens=1)
    return caught.value.message


def test_a_control_request_drains_and_tells_how_it_went(loaded: TritonServer) -> None:
    short, long = Reading(loaded, "grpc", 8, 0.05), Reading(loaded, "http", 2000, 0.05)
    answer: dict[str, Any] = {}
    asking = threading.Thread(target=lambda: answer.update(control_of(loaded, "drain")))
    asking.start()
    wait_for(lambda: states(loaded) == ["draining"])
    assert "is draining: it takes no new requests; retry in " in refused(loaded)
    asking.join(30)
    assert (answer["finished"], answer["ended"]) == (1, 1)
    assert not short.wait().error
    assert "did not finish within drain_timeout=2 s" in long.wait().error and long.text
    assert control_of(loaded, "stats")["state"] == "drained"


def test_sigterm_to_every_process_of_the_model_drains_and_costs_no_token(loaded: TritonServer) -> None:
    """As by a service manager that signals a whole control group."""
    assert loaded.process is not None
    streams = [Reading(loaded, protocol, 12, 0.02) for protocol in ("grpc", "http")]
    for pid in session_members(loaded.process.pid):
        if pid != loaded.process.pid:
            os.kill(pid, signal.SIGTERM)
    wait_for(lambda: "serving" not in states(loaded))
    assert "is draining" in refused(loaded)
    assert [stream.wait().error for stream in streams] == ["", ""]
    wait_for(lambda: states(loaded) == ["drained"])


def test_an_unload_drains(loaded: TritonServer) -> None:
    stream = Reading(loaded, "grpc", 2000, 0.05)
    control = grpcclient.InferenceServerClient(loaded.grpc_address)
    control.unload_model("fake", headers=KEY_HEADERS)
    assert "drain_timeout=2 s" in stream.wait().error and stream.text
    control.close()


def test_a_reload_ends_the_requests_of_the_instance_that_it_replaces(loaded: TritonServer) -> None:
    assert loaded.process is not None
    stream = Reading(loaded, "grpc", 2000, 0.05)
    control = grpcclient.InferenceServerClient(loaded.grpc_address)
    config = {
        "backend": "inflight",
        "instance_group": [{"kind": "KIND_CPU"}],
        "parameters": {"x": {"string_value": "1"}},
    }
    control.load_model("fake", headers=KEY_HEADERS, config=json.dumps(config))
    assert sorted(states(loaded)) == ["serving", "serving"] and not stream.error
    processes = [psutil.Process(stub) for stub in stubs(loaded)]
    assert [process.net_connections("inet") for process in processes] == [[], []], "a stub holds no port of the server"
    assert max(process.num_fds() for process in processes) < 60, "nor the 130 sockets of its threads"
    new = Reading(loaded, "grpc", 10, 0.05)  # the new instance notices that it serves
    assert "drain_timeout=2 s" in stream.wait().error
    assert not new.wait().error
    control.close()
    wait_for(lambda: states(loaded) == ["serving"])


def test_the_launcher_drains_before_it_stops_and_leaves_nothing(triton_installed: None, tmp_path: Path) -> None:
    server = TritonServer(write_repository(tmp_path), exit_timeout=20)
    with server:
        assert server.process is not None
        session = server.process.pid
        streams = [Reading(server, protocol, 20, 0.05) for protocol in ("grpc", "http")]
    assert [stream.wait().error for stream in streams] == ["", ""]
    deadline = time.monotonic() + 20  # the last one was killed, and takes a moment to be gone
    while session_members(session):
        assert time.monotonic() < deadline, session_members(session)
        time.sleep(0.05)
    assert not list(Path("/dev/shm").glob(server.shm_prefix + "*"))
