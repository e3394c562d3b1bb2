"""Clients that send nonsense, hang up or ask for too much: the others never notice, and nothing is left behind."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from processes_of import members_with
from wire import GrpcStream, gauges, post

from inflight_tools.launcher import TritonServer

CALM = {"text_input": "Return a list of", "max_tokens": 40, "temperature": 0, "exclude_input_in_output": True}
ENDLESS = {"max_tokens": 1500, "ignore_eos": True}
NONSENSE = [
    b"",
    b"{",
    b"\xff\xfe",
    b"{}",
    json.dumps({"text_input": "x" * 1_000_000}).encode(),
    *(
        json.dumps({"text_input": "x", "sampling_parameters": text}).encode()
        for text in (
            "[" * 50_000,
            '{"n": 0}',
            '{"temperature": NaN}',
            '{"logit_bias": {"999999": 1}}',
            '{"seed": 1e400}',
        )
    ),
    json.dumps({"text_input": "x", "logit_bias": "[" * 50_000}).encode(),
    json.dumps({"text_input": "x", "best_of": "1" * 400}).encode(),
    json.dumps({"messages": "[" * 50_000}).encode(),
]


def hang_up(address: str, count: int) -> None:
    """Open HTTP streams and drop their connections."""
    host, port = address.split(":")
    body = json.dumps({"text_input": "x", "stream": True, **ENDLESS}).encode()
    head = f"POST /v2/models/demo/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    connections = [socket.create_connection((host, int(port))) for _ in range(count)]
    for connection in connections:
        connection.sendall(head + body)
    time.sleep(0.2)
    for connection in connections:
        connection.close()


def test_a_storm_of_bad_clients_changes_no_answer_and_leaks_no_block(server: TritonServer) -> None:
    url = f"http://{server.http_address}/v2/models/demo/generate"
    calm = post(url, CALM)
    assert calm[0] == 200
    with GrpcStream(server.grpc_address, "demo") as innocent:
        innocent.send(
            "innocent", text_input="Return a list of", sampling_parameters={"temperature": 0, "max_tokens": 40}
        )
        storm = GrpcStream(server.grpc_address, "demo")
        for number in range(60):
            storm.send(str(number), text_input=f"x{number}", stream=True, sampling_parameters=ENDLESS)
        answers = [post(url, body) for body in NONSENSE]
        hang_up(server.http_address, 30)
        storm.close(cancel=True)
        innocent.wait("innocent")
    assert all(status >= 400 and "Traceback" not in said and len(said) < 2000 for status, said in answers), answers
    assert innocent.answers["innocent"].error is None
    assert innocent.answers["innocent"].text == CALM["text_input"] + json.loads(calm[1])["text_output"]
    deadline = time.monotonic() + 60
    while any(
        gauges(server.metrics_address, "demo")[f"inflight_{name}"] for name in ("kv_blocks_used", "requests_running")
    ):
        assert time.monotonic() < deadline, "blocks are still held"
        time.sleep(0.2)
    assert post(url, CALM) == calm


def test_the_engine_does_not_inherit_the_servers_malloc(server: TritonServer) -> None:
    """Only the server and its stubs give back what large responses took."""
    assert server.process is not None
    found = {}
    for part in (b"tritonserver", b"backend_stub", b"inflight.worker"):
        for pid in members_with(server.process.pid, part):
            found[part] = b"GLIBC_TUNABLES=glibc.malloc" in Path(f"/proc/{pid}/environ").read_bytes()
    assert found == {b"tritonserver": True, b"backend_stub": True, b"inflight.worker": False}
