"""Permissions of a server with an admin key, as `inflight serve` starts it: open, with the key only, never."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc
from guarded_entry import CHECKPOINT, HEADER, KEY
from processes_of import members_with
from tritonclient.utils import InferenceServerException
from wire import post, tensor, wait_for

from inflight_client import Client, InflightError
from inflight_tools.launcher import TritonServer


def request(server: TritonServer, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    wanted = urllib.request.Request(f"http://{server.http_address}{path}", body, headers, method=method)
    try:
        with urllib.request.urlopen(wanted, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


OPEN = [
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/mine",
    "/v2/models/mine/ready",
    "/v2/models/mine/config",
]
GUARDED = [
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/none/load"),
    ("POST", "/v2/repository/models/none/unload"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/none/register"),
    ("POST", "/v2/systemsharedmemory/unregister"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("GET", "/v2/models/stats"),
    ("GET", "/v2/models/mine/stats"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/models/mine/trace/setting"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
]


def test_clients_need_no_key(guarded: TritonServer) -> None:
    wait_for(lambda: request(guarded, "GET", "/v2/health/ready")[0] == 200)  # another module's model is being unloaded
    assert {path: request(guarded, "GET", path)[0] for path in OPEN} == dict.fromkeys(OPEN, 200)
    with urllib.request.urlopen(f"http://{guarded.metrics_address}/metrics") as response:
        assert b"inflight_requests_running" in response.read()
    status, answer = post(
        f"http://{guarded.http_address}/v2/models/mine/generate", {"text_input": "Return", "max_tokens": 2}
    )
    assert status == 200, answer
    with Client(guarded.grpc_address, model="mine") as client:
        assert client.ready()
        assert client.metadata()["name"] == "mine"
        assert client.generate("Return", max_tokens=2).text
        assert client.detokenize(client.tokenize("Return")["tokens"]).endswith("Return")
        assert client.model_info()["has_chat_template"]


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_http_management_needs_the_key(guarded: TritonServer, method: str, path: str) -> None:
    body = b"{}" if method == "POST" else None
    refused = request(guarded, method, path, body)
    assert refused[0] == 403, refused
    assert "inflight-admin-key" in refused[1]
    assert request(guarded, method, path, body, **{"inflight-admin-key": KEY + "x"})[0] == 403
    taken = request(guarded, method, path, body, **guarded.admin_headers)
    assert taken[0] != 403, taken


CALLS: list[Callable[[grpc.InferenceServerClient, dict[str, str]], Any]] = [
    lambda client, headers: client.get_model_repository_index(headers=headers),
    lambda client, headers: client.load_model("none", headers=headers),
    lambda client, headers: client.unload_model("none", headers=headers),
    lambda client, headers: client.get_system_shared_memory_status(headers=headers),
    lambda client, headers: client.register_system_shared_memory("none", "/none", 8, headers=headers),
    lambda client, headers: client.get_cuda_shared_memory_status(headers=headers),
    lambda client, headers: client.get_inference_statistics(headers=headers),
    lambda client, headers: client.get_trace_settings(headers=headers),
    lambda client, headers: client.update_log_settings({}, headers=headers),
]


@pytest.mark.parametrize("call", CALLS)
def test_grpc_management_needs_the_key(guarded: TritonServer, call: Callable[..., Any]) -> None:
    with grpc.InferenceServerClient(guarded.grpc_address) as client:
        with pytest.raises(InferenceServerException, match="This protocol is restricted"):
            call(client, {})
        try:
            call(client, guarded.admin_metadata)
        except InferenceServerException as error:
            assert "restricted" not in str(error)


# -- a load request that brings its own model.json ------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A program that leaves a file behind if it is run."""
    path = tmp_path / "script"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    path.chmod(0o755)
    return path


def test_a_web_page_cannot_load_a_model(guarded: TritonServer, script: Path) -> None:
    """A page can POST text/plain to any address without asking, but adds no header of its own."""
    model_json = {"model": str(CHECKPOINT), "python_executable": str(script)}
    files = {"file:1/model.json": base64.b64encode(json.dumps(model_json).encode()).decode()}
    body = json.dumps({"parameters": {"config": '{"backend": "inflight"}', **files}}).encode()
    path = "/v2/repository/models/evil/load"
    assert request(guarded, "POST", path, body, **{"Content-Type": "text/plain"})[0] == 403
    status, answer = request(guarded, "POST", path, body, **guarded.admin_headers)
    assert status == 400
    assert "python_executable may not come from a load request" in answer
    assert not (script.parent / "ran").exists()


@pytest.mark.parametrize("name", ["new", "mine"])  # one that the repository does not have, and one that it has
def test_no_key_lets_a_load_request_name_code(guarded: TritonServer, name: str) -> None:
    keys = {"python_executable": "python3", "trust_remote_code": True, "download_dir": "/tmp/none"}
    model_json = json.dumps({"model": str(CHECKPOINT), **keys}).encode()
    # Without a change in its configuration, Triton keeps a loaded model as it is, and reads none of the files.
    config = json.dumps({"backend": "inflight", "parameters": {"changed": {"string_value": "yes"}}})
    with grpc.InferenceServerClient(guarded.grpc_address) as client:
        with pytest.raises(InferenceServerException, match="and download_dir may not come from a load request"):
            client.load_model(
                name, headers=guarded.admin_metadata, config=config, files={"file:1/model.json": model_json}
            )
        assert client.is_model_ready("mine")


# -- control requests -----------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_control_request_needs_the_key(guarded: TritonServer, protocol: str) -> None:
    address = guarded.grpc_address if protocol == "grpc" else guarded.http_address
    with Client(address, protocol=protocol, model="mine") as client:  # type: ignore[arg-type]
        for key in (None, KEY[:-1], ""):
            with pytest.raises(InflightError, match=r"control='step_trace': the admin key is (missing|wrong)"):
                client.control("step_trace", admin_key=key)
        assert "steps" in json.loads(client.control("step_trace", admin_key=KEY))


# -- the tenant that a proxy names ----------------------------------------------------------------


def ask(
    server: TritonServer, claim: str | None, headers: dict[str, str] | None = None, **parameters: Any
) -> str | None:
    """The error of a request over gRPC, None if it is served."""
    inputs = [tensor("text_input", "Return"), *([] if claim is None else [tensor("tenant", claim)])]
    client, found = grpc.InferenceServerClient(server.grpc_address), []
    try:
        client.start_stream(lambda result, error: found.append(error), headers=headers)
        client.async_stream_infer("mine", inputs, parameters=parameters)
        client.stop_stream()
    finally:
        client.close()
    return None if found[0] is None else str(found[0])


def test_the_tenant_is_what_the_proxy_says(guarded: TritonServer) -> None:
    proxy = {HEADER: "free"}
    assert ask(guarded, None, proxy) is None
    assert ask(guarded, "free", proxy) is None
    assert ask(guarded, "", proxy) is None
    for claim in ("gold", "FREE"):
        assert "a proxy in front of this model names the tenant" in str(ask(guarded, claim, proxy))
    assert "a proxy in front of this model names the tenant" in str(ask(guarded, "gold"))


def test_a_parameter_like_the_header_does_not_replace_it(guarded: TritonServer) -> None:
    proxy = {HEADER: "free"}
    assert ask(guarded, "free", proxy, **{HEADER: "gold"}) is None  # so the header counts
    assert "names the tenant" in str(ask(guarded, "gold", proxy, **{HEADER: "gold"}))
    assert "must come once" in str(ask(guarded, None, proxy, **{HEADER.upper(): "gold"}))
    assert "must come once" in str(ask(guarded, None, None, **{HEADER: 1}))


# -- a chat template that takes its time --------------------------------------------------------------


def renderer_of(server: TritonServer) -> int:
    """Process id of the renderer of chat templates."""
    assert server.process is not None
    (pid,) = members_with(server.process.pid, b"inflight.frontend.chat.render_worker")
    return pid


def test_a_hostile_chat_template_ends_in_time(guarded: TritonServer) -> None:
    with Client(guarded.grpc_address, model="mine") as client:
        with pytest.raises(InflightError, match=r"messages: the chat template took more than 0.2 s"):
            client.generate(messages=[{"role": "bomb", "content": "Return"}])
        assert client.generate(messages=[{"role": "user", "content": "Return"}], max_tokens=2).text


def test_a_chat_that_is_being_rendered_keeps_no_other_request_waiting(guarded: TritonServer) -> None:
    renderer = renderer_of(guarded)
    with Client(guarded.grpc_address, model="mine") as client:
        os.kill(renderer, signal.SIGSTOP)
        try:
            chat = client.stream(messages=[{"role": "user", "content": "Return"}], max_tokens=2)
            reading = threading.Thread(target=lambda: list(chat))
            reading.start()
            assert client.generate("Return", max_tokens=2).text
            assert reading.is_alive()
        finally:
            os.kill(renderer, signal.SIGCONT)
        reading.join(60)
        assert chat.result().text


@pytest.mark.nightly  # 21 s, in which the process could have had its core; test_render_client.py has the faults
def test_a_renderer_that_stays_stopped_is_replaced(guarded: TritonServer) -> None:
    renderer = renderer_of(guarded)
    os.kill(renderer, signal.SIGSTOP)
    chats: list[str] = []
    with Client(guarded.grpc_address, model="mine") as client:

        def ask() -> None:
            chats.append(client.generate(messages=[{"role": "user", "content": "Return"}], max_tokens=2).text)

        asking = [threading.Thread(target=ask) for _ in range(3)]
        for thread in asking:
            thread.start()
        assert client.generate("Return", max_tokens=2).text
        for thread in asking:
            thread.join(90)
    assert len(chats) == 3 and all(chats) and renderer_of(guarded) != renderer
