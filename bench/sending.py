#!/usr/bin/env python3
"""The cost of a streamed response: CPU time of stub, server, engine process and client, and the gaps at a client.

    python bench/sending.py [--streams 32] [--tokens 300] [--step-ms 10] [--rounds 3] [--output FILE]
    python bench/sending.py --device cuda --streams 256 --step-ms 12     as beside an engine on a GPU
    python bench/sending.py --frontends 1 2 4     against the number of stubs that share an engine process

A real tritonserver on 127.0.0.1, whose engine process makes a step of that length without a model (echo_engine.py), so
that nothing but scheduling and sending takes time.  The sides are `stream_interval: 1` and the default, "auto", or the
numbers of stubs: with cores to spare, responses/s grow with the stubs as long as the CPU time of a response stays the
same.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import common
import serving

PARTS = ("client", "server", "stub", "keeper", "engine")


def run(options: dict[str, Any], stubs: int, streams: int, tokens: int, step_ms: float, device: str) -> common.Run:
    requests = [{"prompt": [300 + number % 50] * 16, "out": tokens} for number in range(streams)]
    with serving.served({"max_num_seqs": streams, **options}, stubs, step_ms, device) as server:
        serving.stream_all(server.grpc_address, common.short(requests))
        before, own = serving.cpu_by_kind(server), time.process_time()
        start = time.perf_counter()
        answers = serving.stream_all(server.grpc_address, requests)
        wall = time.perf_counter() - start
        own = time.process_time() - own
        after = serving.cpu_by_kind(server)
    gaps = sorted(1e3 * (b - a) for answer in answers for a, b in itertools.pairwise(answer.times))
    spent = {"client": own, **{kind: seconds - before.get(kind, 0.0) for kind, seconds in after.items()}}
    count = sum(len(answer.times) for answer in answers)
    return {
        "responses": count,
        "seconds": wall,
        "responses_per_second": count / wall,
        **{f"us_per_response_{part}": 1e6 * spent.get(part, 0.0) / count for part in PARTS},
        **{f"us_per_token_{part}": 1e6 * spent.get(part, 0.0) / (streams * tokens) for part in PARTS},
        "tokens_per_second": streams * tokens / wall,
        "stub_cores": spent.get("stub", 0.0) / wall,
        "gap_ms_p50": common.percentile(gaps, 50),
        "gap_ms_p99": common.percentile(gaps, 99),
    }


def main() -> None:
    args = common.options(
        __doc__,
        streams=32,
        tokens=300,
        step_ms=10.0,
        rounds=3,
        device="cpu",
        frontends=dict(type=int, nargs="+", help="stubs"),
    )
    sides: dict[str, tuple[dict[str, Any], int]] = {"stream_interval 1": ({"stream_interval": 1}, 1), "auto": ({}, 1)}
    if args.frontends:
        sides = {f"{count} stubs": ({}, count) for count in args.frontends}
    runs = common.alternate(
        sides,
        args.rounds,
        lambda side, _: run(*sides[side], args.streams, args.tokens, args.step_ms, args.device),
        lambda one: f"{one['responses_per_second']:7.0f} responses/s",
    )
    found = common.medians(runs, *runs[next(iter(runs))][0])
    print(f"{common.machine()}, {args.streams} streams, steps of {args.step_ms:g} ms, medians of {args.rounds} runs")
    for unit in ("us_per_response", "us_per_token"):
        print(f"{unit:<20}" + "".join(f"{part:>9}" for part in PARTS))
        for side, figures in found.items():
            print(f"  {side:<18}" + "".join(f"{figures[f'{unit}_{part}']:9.1f}" for part in PARTS))
    for side, figures in found.items():
        gaps = f"gaps p50 {figures['gap_ms_p50']:.1f} ms, p99 {figures['gap_ms_p99']:.1f} ms"
        rates = f"{figures['tokens_per_second']:7.0f} tokens/s, {figures['responses_per_second']:7.0f} responses/s"
        print(f"  {side:<18}{rates}, {gaps}, stub {figures['stub_cores']:.2f} cores")
    common.record(args, runs, medians=found)


if __name__ == "__main__":
    main()
