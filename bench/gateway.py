#!/usr/bin/env python3
"""The gateway's cost per stream: time to first token, gaps and CPU time; and the throughput of one worker.

    python bench/gateway.py [--streams 1 32] [--rounds 6] [--seconds 9] [--output FILE]
    python bench/gateway.py --base main~1     beside the gateway of an earlier commit

Latency: a real tritonserver whose engine process makes a step each 30 ms without a model (echo_engine.py).  Users
stream completions straight over gRPC, then through a gateway, alternating, against the same server.  A user pauses
for a random time between its requests, so that they meet the steps at random.  Both clients do as little as they can.
An earlier gateway takes its turns in between, against the same server.

Throughput: chunks as that server sends them, replayed as fast as they are taken (replaying_triton.py).  The gateway
has one core, and what surrounds it the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import paired
import serving

if TYPE_CHECKING:
    from inflight_tools.launcher import TritonServer

MODEL, TOKENS, PAUSE = serving.MODEL, 24, 0.06
PROMPT = "the list of names and the places where they live"
REPLAYED_STREAMS, REPLAYED_SECONDS = 16, 6.0
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_GATEWAY = (
    "import json, sys; from inflight_gateway.options import GatewayOptions;"
    "from inflight_gateway.server import ServerOptions, run;"
    "run(GatewayOptions(triton=(sys.argv[1],)), ServerOptions(port=int(sys.argv[2])))"
)

Send = Callable[[], Awaitable[list[float]]]  # one request; when it began, and when each of its chunks came


def free_port() -> int:
    from inflight_tools.ports import pick_ports

    return pick_ports(1)[0]


@contextlib.contextmanager
def child(
    command: list[str], cores: set[int] | None = None, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block."""
    process = subprocess.Popen(command, stdout=sys.stderr, env=environment)
    try:
        if cores:
            os.sched_setaffinity(process.pid, cores)
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str) -> None:
    """Wait until it answers with status 200.  Raises RuntimeError after a minute."""
    import httpx2

    for _ in range(600):
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(url).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{url} did not become ready within 60 s")


@contextlib.contextmanager
def gateway(triton: str, cores: set[int] | None = None, tree: Path = paired.ROOT) -> Iterator[tuple[int, int]]:
    """A gateway with one worker, ready, with the code of a checkout; yields its port and process id."""
    port = free_port()
    with child([sys.executable, "-c", _GATEWAY, triton, str(port)], cores, paired.environment(tree)) as process:
        wait_for(f"http://127.0.0.1:{port}/ready")
        yield port, process.pid


# The two clients


@contextlib.asynccontextmanager
async def over_grpc(address: str, tokens: int = TOKENS) -> AsyncIterator[Send]:
    import grpc
    from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

    message = stream_request(tokens)
    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.stream_stream(STREAM_METHOD, response_deserializer=ModelStreamInferResponse.FromString)

        async def send() -> list[float]:
            times = [time.perf_counter()]
            call = method((message,))
            while (response := await call.read()) is not grpc.aio.EOF:
                if response.error_message:
                    raise RuntimeError(response.error_message)
                if response.infer_response.outputs:
                    times.append(time.perf_counter())
            return times

        yield send


def stream_request(tokens: int = TOKENS) -> bytes:
    """The request that the gateway sends for such a completion."""
    from inflight_client.request import GenerationRequest
    from inflight_client.wire import grpc_request

    options = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "return_num_cached_tokens": True}
    request = GenerationRequest.build(PROMPT, None, None, options, model=MODEL, timeout=60)
    return grpc_request(request, 60)


@contextlib.asynccontextmanager
async def over_http(port: int, tokens: int = TOKENS) -> AsyncIterator[Send]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    request = head.encode() + content
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send() -> list[float]:
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        times = [time.perf_counter()]
        writer.write(request)
        while not (line := await reader.readline()).startswith(b"data: [DONE]"):
            if line.startswith(b'data: {"id"'):
                times.append(time.perf_counter())
            elif line.startswith((b'data: {"error', b"HTTP/1.1 4", b"HTTP/1.1 5")) or not line:
                raise RuntimeError(line)
        while await reader.readline() != b"0\r\n":  # what ends a chunked body
            pass
        await reader.readline()
        idle.append((reader, writer))
        return times

    yield send
    for _, writer in idle:
        writer.close()


# Latency


async def load(send: Send, streams: int, seconds: float, seed: int) -> list[list[float]]:
    """So many users for so long; the times of all requests."""
    found: list[list[float]] = []
    end = time.perf_counter() + seconds

    async def user(pauses: random.Random) -> None:
        await send()  # opens a connection
        while time.perf_counter() < end:
            await asyncio.sleep(pauses.uniform(0, PAUSE))
            found.append(await send())

    await asyncio.gather(*[user(random.Random(seed * 1000 + number)) for number in range(streams)])
    return found


def summary(times: list[list[float]], seconds_of: dict[str, float]) -> dict[str, Any]:
    ttft = sorted(1e3 * (own[1] - own[0]) for own in times)
    gaps = sorted(1e3 * (b - a) for own in times for a, b in itertools.pairwise(own[1:]))

    def figures(values: list[float]) -> dict[str, float]:
        middle, high = (common.percentile(values, percent) for percent in (50, 99))
        return {"p50": middle, "mean": statistics.fmean(values), "p99": high}

    chunks = sum(len(own) - 1 for own in times)
    return {
        "requests": len(times),
        "chunks": chunks,
        "ttft_ms": figures(ttft),
        "itl_ms": figures(gaps),
        "cpu_us_per_chunk": {name: 1e6 * seconds / chunks for name, seconds in seconds_of.items()},
    }


async def alternated(
    server: TritonServer, trees: dict[str, Path], streams: int, args: argparse.Namespace
) -> dict[str, list[common.Run]]:
    """The runs over gRPC, and through the gateway of each tree."""

    def spent(pid: int | None) -> dict[str, float]:
        own = {} if pid is None else {"gateway": serving.cpu_seconds(pid)}
        return {**serving.cpu_by_kind(server), **own, "client": time.process_time()}

    runs: dict[str, list[common.Run]] = {side: [] for side in ("grpc", *trees)}
    with contextlib.ExitStack() as stack:
        started = {side: stack.enter_context(gateway(server.grpc_address, tree=tree)) for side, tree in trees.items()}
        for number in range(args.rounds):
            for side in runs if number % 2 == 0 else reversed(runs):
                port, pid = started.get(side, (0, None))
                async with over_http(port) if port else over_grpc(server.grpc_address) as send:
                    before = spent(pid)
                    times = await load(send, streams, args.seconds, number)
                    cpu = {name: seconds - before.get(name, 0.0) for name, seconds in spent(pid).items()}
                one = summary(times, cpu)
                runs[side].append(one)
                text = f"TTFT p50 {one['ttft_ms']['p50']:6.2f} ms  ITL p50 {one['itl_ms']['p50']:6.2f} ms"
                print(f"{streams} streams  round {number + 1}/{args.rounds}  {side:<8} {text}", flush=True)
    return runs


def differences(ours: list[common.Run], theirs: list[common.Run]) -> dict[str, float]:
    """Medians over the rounds of ours minus theirs, pair by pair; milliseconds."""
    return {
        f"{kind}_{figure}": statistics.median(a[kind][figure] - b[kind][figure] for a, b in zip(ours, theirs))
        for kind in ("ttft_ms", "itl_ms")
        for figure in ("p50", "mean", "p99")
    }


# Throughput


def recorded(address: str) -> dict[str, Any]:
    """The server's answers to the questions of a gateway and to a request, as hexadecimal text."""
    import grpc
    from tritonclient.grpc import service_pb2 as pb

    from inflight_client.questions import model_question
    from inflight_client.wire import grpc_control

    with grpc.insecure_channel(address) as channel:
        stream = channel.stream_stream(STREAM_METHOD)
        metadata = channel.unary_unary("/inference.GRPCInferenceService/ModelMetadata")
        chunks = [chunk.hex() for chunk in stream(iter([stream_request()]))]
        return {
            "metadata": metadata(pb.ModelMetadataRequest(name=MODEL).SerializeToString()).hex(),
            "model": [one.hex() for one in stream(iter([grpc_control(MODEL, model_question())]))],
            "chunks": chunks,
        }


async def flood(port: int, seconds: float) -> int:
    """Read streams without end for so long; returns the number of chunks."""
    content = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "stream": True, "ignore_eos": True})
    request = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n{content}"
    count, end = 0, time.perf_counter() + seconds

    async def read() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request.encode())
        while time.perf_counter() < end and (data := await reader.read(65536)):
            count += data.count(b'data: {"id"')
        writer.close()

    await asyncio.gather(*[read() for _ in range(REPLAYED_STREAMS)])
    return count


async def throughput(record: dict[str, Any], rounds: int, tree: Path) -> list[dict[str, Any]]:
    cores = os.sched_getaffinity(0)
    first, *others = sorted(cores)
    rest = set(others) or {first}
    os.sched_setaffinity(0, rest)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        file, port = Path(folder) / "record.json", free_port()
        file.write_text(json.dumps(record))
        command = [sys.executable, str(common.HERE / "replaying_triton.py"), str(file), str(port)]
        with child(command, rest) as triton, gateway(f"127.0.0.1:{port}", {first}, tree) as (http, pid):
            await flood(http, 1.0)
            for number in range(rounds):
                before = serving.cpu_seconds(pid), serving.cpu_seconds(triton.pid), time.process_time()
                begun = time.perf_counter()
                chunks = await flood(http, REPLAYED_SECONDS)
                wall = time.perf_counter() - begun
                after = serving.cpu_seconds(pid), serving.cpu_seconds(triton.pid), time.process_time()
                cost = [1e6 * (b - a) / chunks for a, b in zip(before, after)]
                each = dict(zip(("gateway", "replaying_triton", "client"), cost))
                runs.append({"chunks_per_second": chunks / wall, "cpu_us_per_chunk": each})
                print(f"throughput {number + 1}/{rounds}  {chunks / wall:7.0f} chunks/s  gateway {cost[0]:.0f} us each")
    os.sched_setaffinity(0, cores)
    return runs


def cpu_of(runs: list[common.Run]) -> dict[str, float]:
    """Microseconds a chunk by process, medians."""
    names = runs[0]["cpu_us_per_chunk"]
    return {name: statistics.median(run["cpu_us_per_chunk"][name] for run in runs) for name in names}


async def main() -> None:
    args = common.options(
        __doc__, streams=[32], rounds=6, seconds=9.0, base=dict(help="an earlier commit, whose gateway takes its turns")
    )
    args.base = paired.hash_of(args.base) if args.base else None
    with paired.checked_out(args.base) if args.base else contextlib.nullcontext() as base:
        trees = {"gateway": paired.ROOT} if base is None else {"gateway": paired.ROOT, args.base: base}
        with serving.served({"stream_interval": 1}, step_ms=30.0) as server:
            record = recorded(server.grpc_address)
            latency = {count: await alternated(server, trees, count, args) for count in args.streams}
        flooded = {side: await throughput(record, 3, tree) for side, tree in trees.items()}
    added: dict[str, dict[str, float]] = {}
    cost: dict[str, dict[str, float]] = {}
    print(f"\n{common.machine()}, medians of {args.rounds} pairs")
    for count, runs in latency.items():
        for side in trees:
            added[f"{side}, {count} streams"] = differences(runs[side], runs["grpc"])
        cost |= {f"{side}, {count} streams": cpu_of(own) for side, own in runs.items()}
    rates = {side: statistics.median(run["chunks_per_second"] for run in own) for side, own in flooded.items()}
    cost |= {f"{side}, throughput": cpu_of(own) for side, own in flooded.items()}
    for name, figures in added.items():
        print(f"  {name:<22} - gRPC, ms  " + "  ".join(f"{figure} {ms:+.2f}" for figure, ms in figures.items()))
    for side, rate in rates.items():
        print(f"  one worker passes on {rate:.0f} chunks/s ({side})")
    for name, parts in cost.items():
        print(f"  CPU us per chunk, {name:<22} " + "  ".join(f"{part} {us:.0f}" for part, us in parts.items()))
    found: dict[str, Any] = {"latency": latency, "throughput": flooded}
    common.record(args, found, added_ms=added, chunks_per_second=rates, cpu_us_per_chunk=cost)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
