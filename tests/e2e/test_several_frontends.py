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

import psutil
import pytest
import tritonclient.grpc as grpc
from model_entries import CONFIG, killed_at_the_end, wait_unloaded, write_entry
from processes_of import members_with, open_when_stopped, run_in_turns, tries
from supervisor_rig import wait_for
from wire import GrpcStream, gauges, post

from inflight_client import Client
from inflight_tools.launcher import TritonServer
from inflight_tools.processes import session_members

STREAMS = 12
DAEMON = b"shared_engine_daemon"  # in the command line of the process that owns a shared engine


@pytest.fixture(scope="module")
def pair(
    triton_installed: None, keeping: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server of its own, because a stub is killed: the demo as the model `pair`, of two instances."""
    repository = tmp_path_factory.mktemp("pair")
    write_entry(repository, "pair", CONFIG + "instance_group [ { kind: KIND_CPU, count: 2 } ]\n", max_num_seqs=64)
    with killed_at_the_end(
        TritonServer(repository, model_control_mode="explicit", load_models=["pair"], env=keeping)
    ) as server:
        yield server


def status_of(server: TritonServer) -> dict[str, Any]:
    """The answer of one of the frontends; Triton chooses which."""
    url = f"http://{server.http_address}/v2/models/pair/generate"
    status, body = post(url, {"text_input": "", "parameters": {"control": "stats"}})
    if status != 200:
        status, body = post(url, {"text_input": "", "control": "stats"})
    assert status == 200, body
    return json.loads(json.loads(body)["text_output"])


def engine_of(server: TritonServer) -> psutil.Process:
    """The engine process, as soon as a frontend that has it and hears from it answers."""
    return psutil.Process(wait_for(lambda: status_of(server)["engine"])["pid"])


def frontends(server: TritonServer) -> dict[int, dict[str, Any]]:
    """By process id of the stub."""
    found: dict[int, dict[str, Any]] = {}
    while len(found) < 2:
        answer = status_of(server)
        found[answer["frontend"]["pid"]] = answer
    return found


def settled(server: TritonServer, num_open: Callable[[], int]) -> dict[int, dict[str, Any]]:
    """`frontends` once they have so many open requests together."""
    while True:
        found = frontends(server)
        if sum(answer["frontend"]["open_requests"] for answer in found.values()) == num_open():
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


def tokens_of(server: TritonServer, model: str, max_tokens: int) -> list[list[int]]:
    with GrpcStream(server.grpc_address, model) as stream:
        ids = open_streams(stream, 0, max_tokens)
        stream.wait(*ids)
        assert [stream.answers[key].error for key in ids] == [None] * STREAMS
        return [stream.answers[key].token_ids for key in ids]


def test_both_serve_what_one_would(pair: TritonServer, server: TritonServer) -> None:
    alone = tokens_of(server, "demo", 40)
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


def test_streams_of_both_survive_the_engine(pair: TritonServer, server: TritonServer) -> None:
    alone = tokens_of(server, "demo", 150)

    def counted() -> list[float]:
        found = gauges(pair.metrics_address, "pair")
        names = ("engine_deaths", "engine_restarts", "requests_replayed")
        return [found.get(f"inflight_{name}_total", 0.0) for name in names]

    def are_interrupted() -> bool:
        before, engine = counted(), engine_of(pair)
        with GrpcStream(pair.grpc_address, "pair") as stream, Client(pair.grpc_address, model="pair") as client:
            engine.suspend()
            ids = open_streams(stream, 0, 150)
            run_in_turns(engine, lambda seconds: stream.has_chunks(ids[0], 2, seconds))
            was_open = open_when_stopped(client, num_stubs=2)
            engine.kill()
            stream.wait(*ids)
            assert [stream.answers[key].error for key in ids] == [None] * STREAMS
            assert [stream.answers[key].token_ids for key in ids] == alone
        wait_for(lambda: [now - then for now, then in zip(counted()[:2], before)] == [1, 1])
        assert not was_open or counted()[2] > before[2]
        return was_open > 0

    assert any(are_interrupted() for _ in tries())


def engine_processes(server: TritonServer) -> list[int]:
    """Engines below the server, and the daemons that own shared ones; they are no children of a stub."""
    assert server.process is not None
    found = []
    for pid in session_members(server.process.pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            engine = Path(f"/proc/{pid}/comm").read_text().strip() == "inflight-engine"
            if engine or DAEMON in command:
                found.append(pid)
    return found


def daemon_of(server: TritonServer) -> psutil.Process:
    assert server.process is not None
    (daemon,) = members_with(server.process.pid, DAEMON)
    return psutil.Process(daemon)


def test_a_daemon_that_is_stopped_holds_no_stream_up_and_loses_no_engine(
    pair: TritonServer, server: TritonServer
) -> None:
    """Streams of both end beside it; those of an engine that dies meanwhile end once it goes on."""
    alone = tokens_of(server, "demo", 40)
    daemon, engine = daemon_of(pair), engine_of(pair)

    def deaths() -> float:
        return gauges(pair.metrics_address, "pair").get("inflight_engine_deaths_total", 0.0)

    before = deaths()
    daemon.suspend()
    try:
        assert tokens_of(pair, "pair", 40) == alone
        assert engine.is_running() and engine_of(pair) == engine
        engine.suspend()  # no stream ends before it is killed
        with GrpcStream(pair.grpc_address, "pair") as stream:
            ids = open_streams(stream, 0)
            wait_for(lambda: sum(one["frontend"]["open_requests"] for one in frontends(pair).values()) == STREAMS)
            engine.kill()
            wait_for(lambda: deaths() > before)  # the daemon is asked for another engine
            assert not any(stream.answers[key].finals for key in ids)
            daemon.resume()
            stream.wait(*ids)
            assert [stream.answers[key].error for key in ids] == [None] * STREAMS
            assert [stream.answers[key].token_ids for key in ids] == alone
    finally:
        daemon.resume()
    assert daemon_of(pair) == daemon and engine_of(pair) != engine


@pytest.mark.nightly
def test_a_reload_gets_an_engine_of_its_own_and_an_unload_leaves_nothing(pair: TritonServer) -> None:
    old = engine_of(pair)
    with GrpcStream(pair.grpc_address, "pair") as stream, grpc.InferenceServerClient(pair.grpc_address) as control:
        ids = open_streams(stream, 1, 120)
        stream.wait_chunks(ids[0], 2)
        control.load_model("pair", config=json.dumps({"backend": "inflight", **_TWO}))
        stream.wait(*ids)  # the old instances finish what they have
        assert [stream.answers[key].error for key in ids] == [None] * STREAMS
        assert all(answer["engine"]["pid"] != old.pid for answer in frontends(pair).values())
        control.unload_model("pair")
    wait_unloaded(pair, "pair")
    wait_for(lambda: not engine_processes(pair))
    assert not sockets_of(pair)
    with grpc.InferenceServerClient(pair.grpc_address) as control:
        control.load_model("pair")


_TWO = {"instance_group": [{"kind": "KIND_CPU", "count": 2}], "parameters": {"reloaded": {"string_value": "yes"}}}


def sockets_of(server: TritonServer) -> list[str]:
    """Abstract sockets of shared engines that processes of this server hold."""
    inodes = set()
    assert server.process is not None
    for pid in session_members(server.process.pid):
        with contextlib.suppress(OSError):  # the process has ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(link))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@inflight-" in line]
    return [line[-1] for line in lines if f"socket:[{line[6]}]" in inodes]


def wait_until_it_is_silent(stub: int) -> None:
    """Returns right after its threads asked Triton, as they do every 70 ms, which requests were cancelled.

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

    wait_for(paused, seconds=60)


@pytest.mark.nightly  # test_shared_engine_daemon.py kills stubs, test_shared_engine.py looks at the others' streams
def test_a_stub_that_is_killed_with_the_engine_takes_only_its_own_streams_along(
    pair: TritonServer, server: TritonServer
) -> None:
    """Runs last: Triton 24.10 does not restart a stub, and its streams hang."""
    alone = tokens_of(server, "demo", 300)
    engine = engine_of(pair)
    with GrpcStream(pair.grpc_address, "pair") as stream:
        ids: list[str] = []
        for run in tries():  # no stream ends once the engine is stopped
            engine.suspend()
            ids = open_streams(stream, run, 300)
            run_in_turns(engine, lambda seconds: stream.has_chunks(ids[0], 1, seconds))  # noqa: B023
            seen = settled(pair, lambda: sum(not stream.answers[key].finals for key in ids))  # noqa: B023
            if not any(stream.answers[key].finals for key in ids):
                break
            engine.resume()
            stream.wait(*ids)
        else:
            pytest.fail("a stream had ended in every try")
        for run in tries():  # Triton chooses a stub for each stream, and can choose one for all
            if all(answer["frontend"]["open_requests"] for answer in seen.values()):
                break
            ids += open_streams(stream, 100 + run, 300)
            seen = settled(pair, lambda: len(ids))  # noqa: B023
        victim, survivor = sorted(seen, key=lambda pid: seen[pid]["frontend"]["open_requests"])
        expected = seen[survivor]["frontend"]["open_requests"]
        assert 0 < expected < len(ids)
        wait_until_it_is_silent(victim)
        os.kill(victim, signal.SIGKILL)
        engine.kill()

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
    assert engine.pid not in engine_processes(pair) and len(engine_processes(pair)) == 2  # a daemon and its engine
