"""Real tritonservers with the demo model, gateways in front of them, and clients that compare answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from model_entries import copy_entry
from processes_of import engine_processes

from inflight_client import Client
from inflight_tools.installation import LauncherError
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports
from inflight_tools.processes import session_members

_START_SECONDS = 120.0
_STARTS = 4


class Process:
    """A child that listens at `url`; `start` waits until it answers at `path`."""

    def __init__(self, command: Sequence[str], port: int, path: str = "/ready") -> None:
        self.command, self.url, self._path = list(command), f"http://127.0.0.1:{port}", path
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        self.process = subprocess.Popen(self.command)
        deadline = time.monotonic() + _START_SECONDS
        while not answers(self.url + self._path):
            assert self.process.poll() is None, f"{self.command[0]} ended with status {self.process.returncode}"
            assert time.monotonic() < deadline, f"{self.command[0]} does not answer"
            time.sleep(0.1)
        return self

    def stop(self, with_signal: int = signal.SIGTERM) -> None:
        """Safe to repeat."""
        if self.process is not None:
            self.process.send_signal(with_signal)
            self.process.wait(60)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5, verify=False).status_code == 200  # certificates take long to load
    return False


def gateway(tritons: Sequence[str], *options: str) -> Process:
    (port,) = pick_ports(1)
    command = [str(Path(sys.executable).with_name("inflight")), "gateway", "--port", str(port), *options]
    return Process([*command, *(part for address in tritons for part in ("--triton", address))], port)


class Fleet:
    """Replicas: each a tritonserver with the model `demo`, and a gateway that prefers it and knows the others.

    The servers have no metrics, and forward headers.

    Args:
        count: of replicas.
        first: an existing server for the first one; None starts one.
        env: environment variables of the servers that it starts.

    Attributes:
        servers: the tritonservers.
        gateways: their gateways.
    """

    def __init__(self, count: int, first: TritonServer | None = None, env: Mapping[str, str] | None = None) -> None:
        self._ends = contextlib.ExitStack()
        self._env = env
        self._repository = Path(self._ends.enter_context(tempfile.TemporaryDirectory()))
        copy_entry(self._repository, "demo", spare_engine=False)
        given = [] if first is None else [first]
        self.servers = [*given, *(self._server({}) for _ in range(count - len(given)))]
        self._first_own = len(given)
        self._ends.callback(lambda: [server.kill() for server in self.servers[self._first_own :]])
        try:
            for index in self.own:
                self._start(index)
            self.gateways = [self._gateway(index) for index in range(count)]
            for process in self.gateways:
                self.run(process)
        except BaseException:
            self.close()
            raise

    @property
    def own(self) -> range:
        """Indices of the servers that tests can kill and restart."""
        return range(self._first_own, len(self.servers))

    def _server(self, ports: Mapping[str, int]) -> TritonServer:
        return TritonServer(
            self._repository,
            http_port=ports.get("HTTP", 0),
            grpc_port=ports.get("GRPC", 0),
            metrics_port=None,
            model_control_mode="explicit",
            load_models=["demo"],
            exit_timeout=20,
            env=self._env,
            extra_args=[f"--{kind}-header-forward-pattern=.*" for kind in ("http", "grpc")],
        )

    def _start(self, index: int) -> None:
        """Retries if Triton forgets its model, which happens if its stub gets no CPU time for seconds."""
        for attempt in range(_STARTS):
            self._launch(index)
            try:
                return self.servers[index].wait_ready(_START_SECONDS)
            except LauncherError:
                if attempt == _STARTS - 1:
                    raise
                self._renew(index)

    def _launch(self, index: int) -> None:
        """Retries while another process has one of its ports, which were free while it was down."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return self.servers[index].start()
            except LauncherError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(1)

    def _renew(self, index: int) -> None:
        self.servers[index].kill()
        self.servers[index] = self._server(self.servers[index].ports)

    def _gateway(self, index: int) -> Process:
        own, *others = self.addresses[index:] + self.addresses[:index]
        return gateway([own, *others], "--exit-timeout", "60", "--tool-call-parser", "hermes")

    @property
    def addresses(self) -> list[str]:
        return [server.grpc_address for server in self.servers]

    def run(self, process: Process) -> Process:
        """Start it; it ends with the fleet."""
        self._ends.callback(process.stop)
        return process.start()

    def kill(self, index: int) -> None:
        """The tritonserver ends as if its machine lost power: it sends nothing more."""
        process = self.servers[index].process
        assert process is not None
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in session_members(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def revive(self, index: int) -> None:
        """Start a tritonserver that was killed or stopped again, on its ports."""
        self._renew(index)
        self._start(index)

    def restart(self, index: int) -> None:
        """Restart a replica as an orchestrator does: gateway first, each with the time that its requests need."""
        self.gateways[index].stop()
        self.servers[index].stop()
        self.revive(index)
        self.gateways[index].start()

    def open_requests(self) -> list[int]:
        """At each tritonserver, also while its engine is stopped."""
        counts = []
        for address in self.addresses:
            with Client(address) as client:
                counts.append(json.loads(client.control("stats"))["frontend"]["open_requests"])
        return counts

    def engine(self, index: int) -> Any:
        """Waits for the next one if the server has just lost one."""
        server, deadline = self.servers[index], time.monotonic() + _START_SECONDS
        while len(engines := engine_processes(server, "demo")) != 1:
            assert server.is_running(), server.exit_reason()
            assert time.monotonic() < deadline, f"{len(engines)} engines instead of one"
            time.sleep(0.1)
        return engines[0]

    def close(self) -> None:
        self._ends.close()


class Answer:
    """One request over SSE, and its events.

    Attributes:
        begun: set with the first event.
        result: merged events; only equal answers have equal results.
    """

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self.url, self.path, self.body = url, path, body
        self.begun = asyncio.Event()
        self.events: list[dict[str, Any]] = []
        self.ended_well = False

    async def read(self, http: httpx.AsyncClient) -> Any:
        """The result; raises `httpx.HTTPError` if the stream broke."""
        async with http.stream("POST", self.url + self.path, json={**self.body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: [DONE]"):
                    self.ended_well = True
                elif line.startswith("data: "):
                    self.events.append(json.loads(line[6:]))
                    self.begun.set()
        if self.path == "/v1/responses":
            self.ended_well = self.events[-1]["type"] in ("response.completed", "response.incomplete")
        assert self.ended_well, f"the stream ended without its last event, behind {self.events[-1:]}"
        return self.result

    @property
    def result(self) -> Any:
        return _response(self.events[-1]) if self.path == "/v1/responses" else _choices(self.events)


def _choices(events: list[dict[str, Any]]) -> Any:
    """Output of completions and chats, by choice."""
    found: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(list))
    usage = None
    for event in events:
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            mine, delta = found[choice["index"]], choice.get("delta", choice)
            mine["text"].append(delta.get("text") or delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                mine["calls"].append(f"{call['index']} {call['function'].get('name')}")
                mine[f"arguments {call['index']}"].append(call["function"].get("arguments") or "")
            mine["token_ids"] += choice.get("token_ids") or []
            _add_logprobs(mine, choice.get("logprobs") or {})
            if choice.get("finish_reason"):
                mine["finish_reason"].append(choice["finish_reason"])
    for mine in found.values():
        for name, value in mine.items():
            if name == "text" or name.startswith("arguments"):
                mine[name] = "".join(value)
            elif name == "calls":
                mine[name] = [call for call in value if not call.endswith("None")]
    return {index: dict(mine) for index, mine in sorted(found.items())}, _counts(usage)


def _add_logprobs(mine: dict[str, Any], logprobs: dict[str, Any]) -> None:
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content"):
        mine[name] += logprobs.get(name) or []


def _counts(usage: dict[str, Any] | None) -> Any:
    """Usage without the tokens found in caches, which differ from server to server."""
    return usage and {name: value for name, value in usage.items() if isinstance(value, int)}


def _response(event: dict[str, Any]) -> Any:
    response = event["response"]
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return response["status"], output, _counts(response["usage"])


def metric(url: str, pattern: str) -> float:
    """Sum of a gateway's metrics whose line matches."""
    text = httpx.get(f"{url}/metrics", verify=False).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(pattern, line))


async def until(condition: Callable[[], Any]) -> Any:
    """Wait for a condition; if it never holds, the test's timeout ends the test."""
    while not (value := condition()):
        await asyncio.sleep(0.05)
    return value


async def step_until_begun(fleet: Fleet, index: int, waiting: Callable[[], list[Answer]]) -> None:
    """Let a stopped engine run for moments only until all answers have begun, and leave it stopped."""
    engine = fleet.engine(index)
    while any(not answer.begun.is_set() for answer in waiting()):
        engine.resume()
        await asyncio.sleep(0.002)
        engine.suspend()
        await asyncio.sleep(0.05)
