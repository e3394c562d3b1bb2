"""Two stubs with one engine process, in a real tritonserver."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc
from supervisor_rig import wait_for
from wire import GrpcStream, gauges, post

from inflight_tools.launcher import TritonServer
from inflight_tools.processes import session_members

REPOSITORY = Path(__file__).parents[2] / "model_repository"
STREAMS = 12


def write_model(repository: Path, name: str, count: int) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    group = f"instance_group [ {{ kind: KIND_CPU, count: {count} }} ]\n"
    (version.parent / "config.pbtxt").write_text(f'backend: "inflight"\n{group}')
    options = json.loads((REPOSITORY / "demo" / "1" / "model.json").read_text())
    options["model"] = str(REPOSITORY / "demo" / "1" / "checkpoint")
    (version / "model.json").write_text(json.dumps(options))


@pytest.fixture(scope="module")
def pair(triton_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with the model `pair`, of two instances, and `alone`, of one."""
    repository = tmp_path_factory.mktemp("pair")
    write_model(repository, "pair", 2)
    write_model(repository, "alone", 1)
    with TritonServer(
        repository, model_control_mode="explicit", load_models=["pair", "alone"], exit_timeout=5
    ) as server:
        yield server


def status_of(server: TritonServer) -> dict[str, Any]:
    """What one of the frontends says; Triton chooses which."""
    url = f"http://{server.http_address}/v2/models/pair/generate"
    status, body = post(url, {"text_input": "", "parameters": {"control": "stats"}})
    if status != 200:
        status, body = post(url, {"text_input": "", "control": "stats"})
    assert status == 200, body
    return json.loads(json.loads(body)["text_output"])


def frontends(server: TritonServer) -> dict[int, dict[str, Any]]:
    """By process id of the stub."""
    found: dict[int, dict[str, Any]] = {}
    while len(found) < 2:
        answer = status_of(server)
        found[answer["frontend"]["pid"]] = answer
    return found


def open_streams(stream: GrpcStream, run: int, max_tokens: int = 40) -> list[str]:
    ids = [f"{run}-{k}" for k in range(STREAMS)]
    for k, request_id in enumerate(ids):
        # A seed makes a sampled request the same everywhere; the others are greedy.
        params = {"temperature": k % 2, "seed": k, "max_tokens": max_tokens + k, "ignore_eos": True}
        stream.send(
            request_id,
            text_input=f"request number {k}",
            stream=True,
            sampling_parameters=params,
            return_token_ids=True,
        )
    return ids


def tokens_of(server: TritonServer, model: str, max_tokens: int, during: Callable[[], None] = lambda: None) -> Any:
    with GrpcStream(server.grpc_address, model) as stream:
        ids = open_streams(stream, 0, max_tokens)
        stream.wait_chunks(ids[0], 2)
        during()
        stream.wait(*ids)
        assert [stream.answers[key].error for key in ids] == [None] * STREAMS
        return [stream.answers[key].token_ids for key in ids]


def test_both_serve_what_one_would(pair: TritonServer) -> None:
    alone = tokens_of(pair, "alone", 40)
    before = gauges(pair.metrics_address, "pair")
    assert tokens_of(pair, "pair", 40) == alone
    seen = frontends(pair)
    assert all(answer["frontend"]["requests"].get("finished", 0) for answer in seen.values()), "one did all the work"
    assert len({answer["engine"]["pid"] for answer in seen.values()}) == 1
    total = sum(len(tokens) for tokens in alone)

    def counted(name: str) -> float:
        return gauges(pair.metrics_address, "pair").get(name, 0.0) - before.get(name, 0.0)

    assert counted("vllm:request_success_total") == STREAMS
    wait_for(lambda: counted("vllm:generation_tokens_total") == total)
    wait_for(lambda: counted("inflight_batch_size_sum") == total)  # each row of each step is counted once
    assert gauges(pair.metrics_address, "pair")["inflight_kv_blocks_free"] == next(iter(seen.values()))["num_blocks"]


def test_streams_of_both_survive_the_engine(pair: TritonServer) -> None:
    alone = tokens_of(pair, "alone", 150)
    pid = status_of(pair)["engine"]["pid"]
    assert tokens_of(pair, "pair", 150, lambda: os.kill(pid, signal.SIGKILL)) == alone
    found = gauges(pair.metrics_address, "pair")
    assert (found["inflight_engine_deaths_total"], found["inflight_engine_restarts_total"]) == (1, 1)


def engine_processes(server: TritonServer) -> list[int]:
    """Keepers and engines below the server; a spare engine comes and goes by itself."""
    assert server.process is not None
    found = []
    for pid in session_members(server.process.pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            engine = Path(f"/proc/{pid}/comm").read_text().strip() == "inflight-engine"
            if engine or b"shared_engine_daemon.py" in command:
                found.append(pid)
    return found


def test_a_reload_gets_an_engine_of_its_own_and_an_unload_leaves_nothing(pair: TritonServer) -> None:
    old = status_of(pair)["engine"]["pid"]
    with GrpcStream(pair.grpc_address, "pair") as stream, grpc.InferenceServerClient(pair.grpc_address) as control:
        ids = open_streams(stream, 1, 120)
        stream.wait_chunks(ids[0], 2)
        control.load_model("pair", config=json.dumps({"backend": "inflight", **_TWO}))
        stream.wait(*ids)  # the old ones finish what they have
        assert [stream.answers[key].error for key in ids] == [None] * STREAMS
        assert all(answer["engine"]["pid"] != old for answer in frontends(pair).values())
        control.unload_model("pair")
    wait_for(lambda: len(engine_processes(pair)) == 1)  # that of `alone`
    assert not sockets_of(pair)
    with grpc.InferenceServerClient(pair.grpc_address) as control:
        control.load_model("pair")


_TWO = {"instance_group": [{"kind": "KIND_CPU", "count": 2}], "parameters": {"reloaded": {"string_value": "yes"}}}


def sockets_of(server: TritonServer) -> list[str]:
    """Abstract sockets of shared-engine daemons that processes of this server hold."""
    inodes = set()
    assert server.process is not None
    for pid in session_members(server.process.pid):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@inflight-" in line]
    return [line[-1] for line in lines if f"socket:[{line[6]}]" in inodes]


def wait_while_it_talks(stub: int) -> None:
    """Until right after its threads asked Triton, every 70 ms, which requests were cancelled.

    A stub that dies with a lock of the memory that it shares with Triton 24.10 takes the server along.
    """

    def running() -> tuple[bool, int]:
        """Whether a thread runs, and how often one of them went to sleep so far."""
        found = [status.read_text() for status in Path(f"/proc/{stub}/task").glob("*/status")]
        switches = sum(int(line.split()[1]) for text in found for line in text.splitlines() if "ctxt_switches" in line)
        return any("State:\tS" not in text for text in found), switches

    seen = [running()]

    def paused() -> bool:
        time.sleep(0.01)
        seen.append(running())
        return len(seen) > 2 and not seen[-1][0] and seen[-3][1] < seen[-2][1] == seen[-1][1]

    wait_for(paused)


def test_a_stub_that_is_killed_with_the_engine_takes_only_its_own_streams_along(pair: TritonServer) -> None:
    """Last: Triton 24.10 does not restart a stub, and its streams hang."""
    alone = tokens_of(pair, "alone", 600)
    engine = status_of(pair)["engine"]["pid"]
    with GrpcStream(pair.grpc_address, "pair") as stream:
        ids = open_streams(stream, 2, 600)
        stream.wait_chunks(ids[0], 1)
        os.kill(engine, signal.SIGSTOP)  # in the middle of whatever it does, and no stream ends from here on
        seen = frontends(pair)
        victim, survivor = sorted(seen, key=lambda pid: seen[pid]["frontend"]["open_requests"])
        expected = seen[survivor]["frontend"]["open_requests"]
        assert 0 < expected < STREAMS
        wait_while_it_talks(victim)
        os.kill(victim, signal.SIGKILL)
        os.kill(engine, signal.SIGKILL)

        def ended() -> list[str]:
            return [key for key in ids if stream.answers[key].finals]

        with contextlib.suppress(queue.Empty):
            while len(ended()) < expected:
                stream.events.get(timeout=60)
        errors = {key: str(answer.error) for key, answer in stream.answers.items() if answer.error}
        assert len(ended()) >= expected, f"{len(ended())} of {expected} ended ({seen}, victim {victim}); {errors}"
        for key in ended():
            assert stream.answers[key].token_ids == alone[int(key.split("-")[1])]
        stream.client.stop_stream(cancel_requests=True)
    assert engine not in engine_processes(pair) and len(engine_processes(pair)) == 3  # a daemon, its engine, `alone`'s
