#!/usr/bin/env python3
"""The gaps between responses as a client sees them: in-process, over gRPC, over Triton's HTTP, through the gateway.

    python bench/gaps.py [--streams 1 16 64 256] [--tokens 64] [--rounds 3] [--output FILE]

So many streams start at once, on the benchmarks' checkpoint; client, gateway, server and engine share the cores.  The
in-process side is `EngineCore.step()` in a loop, without text: its gaps are the engine's steps.  "http" reads the
server-sent events of `generate_stream`.  A response has the tokens since the one before; `tokens_per_response` tells
how many.  The sides alternate, against one server and one gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import common
import serving

import gateway

SIDES = ("in-process", "grpc", "http", "gateway")


def options_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**common.engine_options(arguments), "max_num_seqs": max(arguments["streams"]), "max_model_len": 512}


def in_process(side: str, arguments: dict[str, Any]) -> common.Run:
    """The times of all responses, for each number of streams."""
    core = common.engine(options_of(arguments))
    ids = itertools.count()
    found = {}
    for streams in (1, *arguments["streams"]):  # the first is a warm-up
        times: dict[int, list[float]] = defaultdict(list)
        for _ in range(streams):
            common.add(core, next(ids), list(range(300, 312)), max_tokens=arguments["tokens"])
        while core.has_work:
            message = core.step()
            now = time.perf_counter()
            for delta in message.deltas:
                times[delta.request_id].append(now)
        found[str(streams)] = list(times.values())
    return found


@contextlib.asynccontextmanager
async def over_triton_http(address: str, tokens: int) -> AsyncIterator[gateway.Send]:
    sampling = json.dumps({"max_tokens": tokens, "ignore_eos": True, "temperature": 0})
    body = {"text_input": gateway.PROMPT, "stream": True, "sampling_parameters": sampling}
    content = json.dumps({**body, "exclude_input_in_output": True}).encode()
    host, port = address.rsplit(":", 1)
    head = f"POST /v2/models/{serving.MODEL}/generate_stream HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}"
    request = f"{head}\r\nConnection: close\r\n\r\n".encode() + content

    async def send() -> list[float]:
        reader, writer = await asyncio.open_connection(host, int(port))
        times = [time.perf_counter()]
        writer.write(request)
        while line := await reader.readline():
            if line.startswith(b"data: "):
                if b'"error"' in line[:20]:
                    raise RuntimeError(line)
                times.append(time.perf_counter())
            elif line.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
                raise RuntimeError(line)
        writer.close()
        return times

    yield send


async def served_times(side: str, server: Any, port: int, streams: int, tokens: int) -> list[list[float]]:
    """The times of all responses of one round of a side."""
    connected = {
        "grpc": lambda: gateway.over_grpc(server.grpc_address, tokens),
        "http": lambda: over_triton_http(server.http_address, tokens),
        "gateway": lambda: gateway.over_http(port, tokens),
    }[side]
    async with connected() as send:
        await send()
        answers = await asyncio.gather(*[send() for _ in range(streams)])
    return [times[1:] for times in answers]


def figures(times: list[list[float]], tokens: int) -> common.Run:
    gaps = sorted(1e3 * (b - a) for own in times for a, b in itertools.pairwise(own))
    first, last = min(own[0] for own in times), max(own[-1] for own in times)
    return {
        "gap_ms_p50": common.percentile(gaps, 50),
        "gap_ms_p99": common.percentile(gaps, 99),
        "tokens_per_response": tokens * len(times) / sum(map(len, times)),
        "tokens_per_second": tokens * len(times) / (last - first),
    }


async def main() -> None:
    args = common.options(
        __doc__,
        **{name: value for name, value in common.engine_sides(tokens=64).items() if name != "requests"},
        streams=dict(type=int, nargs="+", default=[1, 16, 64, 256]),
    )
    arguments = {**vars(args), "output": None}
    runs: dict[str, list[common.Run]] = defaultdict(list)
    with serving.served(options_of(arguments)) as server, gateway.gateway(server.grpc_address) as (port, _):
        serving.wait_for_rest(server)
        for number in range(args.rounds):
            alone = common.in_fresh_process(__file__, "in-process", arguments)
            for streams, side in itertools.product(args.streams, SIDES):
                if side == "in-process":
                    times = alone[str(streams)]
                else:
                    times = await served_times(side, server, port, streams, args.tokens)
                one = figures(times, args.tokens)
                runs[f"{side}, {streams}"].append(one)
                shown = "  ".join(f"{name} {value:.1f}" for name, value in one.items())
                print(f"round {number + 1}/{args.rounds}  {streams:4} streams  {side:<10}  {shown}", flush=True)
    found = common.medians(runs, "gap_ms_p50", "gap_ms_p99", "tokens_per_response", "tokens_per_second")
    print(f"\n{common.machine()}, medians of {args.rounds} rounds")
    for name, one in found.items():
        print(f"  {name:<16} " + "  ".join(f"{key} {value:.1f}" for key, value in one.items()))
    common.record(args, runs, medians=found)


if __name__ == "__main__":
    if not common.ran_side(in_process):
        import uvloop

        uvloop.run(main())
