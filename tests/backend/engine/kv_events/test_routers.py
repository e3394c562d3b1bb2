"""Real subscribers: vllm-router's `kv_aware` policy, and vLLM's own decoder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from array import array
from collections import Counter
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kv_events_rig import block_hashes
from kv_events_sockets import publishing

from inflight.engine.kv_events.known_blocks import Cleared, EventBatch, KnownBlocks, Removed, Stored
from inflight.engine.kv_events.publisher import ZmqPublisher
from inflight_tools.ports import pick_ports

pytestmark = pytest.mark.nightly

VLLM = os.environ.get("INFLIGHT_VLLM", "")  # the Python of an environment with vLLM
MODEL = str(Path(__file__).parents[4] / "model_repository/demo/1/checkpoint")
_ATTEMPTS = 200


class Worker(BaseHTTPRequestHandler):
    """An OpenAI server that says its port."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "test"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        text = str(self.server.server_address[1])
        choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "1", "object": "text_completion", "created": 1, "model": MODEL}
        self._reply({**answer, "choices": [choice], "usage": usage})

    def _reply(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def stored(token_ids: list[int]) -> Stored:
    return Stored(None, block_hashes(16, token_ids), array("i", token_ids), None)


class Router:
    """vllm-router in front of two workers."""

    def __init__(self, stack: ExitStack, ports: list[int], events: list[int], replays: list[int]) -> None:
        self.port, prometheus = pick_ports(2)
        url = "http://127.0.0.1:{}".format
        command = [str(Path(sys.executable).with_name("vllm-router")), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--prometheus-port", str(prometheus), "--policy", "kv_aware", "--kv-event-model", MODEL]
        command += ["--worker-urls", *map(url, ports)]
        for port, event, replay in zip(ports, events, replays):
            command += ["--kv-event-source", f"{url(port)}=tcp://127.0.0.1:{event}"]
            command += ["--kv-event-replay-source", f"{url(port)}=tcp://127.0.0.1:{replay}"]
        self.process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        stack.callback(self.process.kill)

    def ask(self, token_ids: list[int]) -> int | None:
        """The port of the worker that answers a prompt; None: not yet."""
        body = json.dumps({"model": MODEL, "prompt": [*token_ids, 7], "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return int(json.load(answer)["choices"][0]["text"])
        except OSError:
            return None

    def comes_to(self, expected: dict[int, list[int]]) -> None:
        """Wait until prompts go to these ports, and see that they stay there."""
        for _ in range(_ATTEMPTS):
            if all(self.ask(prompt) == port for port, prompt in expected.items()):
                break
            threading.Event().wait(0.1)
        for port, prompt in expected.items():
            assert Counter(self.ask(prompt) for _ in range(5)) == {port: 5}


def test_vllm_router_follows_the_events_of_engines_also_when_one_is_replaced() -> None:
    if not Path(sys.executable).with_name("vllm-router").exists():
        pytest.skip("no vllm-router: pip install vllm-router, which has wheels for Linux on x86-64")
    first, second = [*range(100, 420)], [*range(900, 1220)]
    with ExitStack() as stack:
        servers = [ThreadingHTTPServer(("127.0.0.1", 0), Worker) for _ in range(2)]
        for server in servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        a, b = ports = [server.server_address[1] for server in servers]
        free = pick_ports(4)
        events, replays = free[:2], free[2:]

        def engine(index: int) -> ZmqPublisher:
            endpoints = {"endpoint": f"tcp://lo:{events[index]}", "replay_endpoint": f"tcp://lo:{replays[index]}"}
            made = stack.enter_context(publishing(block_size=16, **endpoints))
            made.put([Cleared()])
            return made

        engines = [engine(0), engine(1)]
        engines[0].put([stored(first)])
        router = Router(stack, ports, events, replays)
        engines[1].put([stored(second)])
        router.comes_to({a: first, b: second})
        engines[0].put([Removed(block_hashes(16, first))])
        engines[1].put([stored(first)])
        router.comes_to({b: first})
        engines[1].close()
        engines[1] = engine(1)  # it has nothing
        engines[0].put([stored(first), stored(second)])
        router.comes_to({a: first})
        router.comes_to({a: second})


def test_vllm_decodes_the_events() -> None:
    if not VLLM:
        pytest.skip("set INFLIGHT_VLLM to the Python of an environment with vLLM")
    known = KnownBlocks(4)
    with_adapter = Stored(block_hashes(4, [1] * 4)[0], block_hashes(4, [2] * 8), array("i", [2] * 8), "french")
    changes = [Cleared(), Stored(None, block_hashes(4, [1] * 4), array("i", [1] * 4), None), with_adapter]
    events = [change.tell(known) for change in (*changes, Removed(block_hashes(4, [1] * 4)))]
    payload = msgspec.msgpack.encode(EventBatch(1.5, events, 3))
    script = (
        "import sys, msgspec\nfrom vllm.distributed.kv_events import KVEventBatch\n"
        "batch = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=KVEventBatch)\n"
        "print(batch.ts, batch.data_parallel_rank, *[type(event).__name__ for event in batch.events])\n"
        "stored = batch.events[2]\n"
        "print(stored.token_ids, stored.block_size, stored.medium, stored.lora_name, stored.extra_keys)\n"
        "print(stored.parent_block_hash == batch.events[1].block_hashes[0] == batch.events[3].block_hashes[0])\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [VLLM, "-c", script, payload.hex()]
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found[-3:] == [
        "1.5 3 AllBlocksCleared BlockStored BlockStored BlockRemoved",
        f"{[2] * 8} 4 GPU french [('french',), ('french',)]",
        "True",
    ]
