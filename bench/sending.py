#!/usr/bin/env python3
"""The cost of a streamed response: CPU time of stub, server, engine process and client, and the gaps at a client.

    python bench/sending.py [--streams 32] [--tokens 300] [--step-ms 10] [--rounds 3] [--output FILE]
    python bench/sending.py --device cuda --streams 256 --step-ms 12     as beside an engine on a GPU
    python bench/sending.py --frontends 1 2 --outputs 1 4     numbers of stubs of an engine process, and of outputs
    python bench/sending.py --device cuda --streams 256 --step-ms 12 --base 4de9815a --base-streams 32
                                                                         beside an earlier commit

A real tritonserver on 127.0.0.1, whose engine process makes a step of that length without a model (echo_engine.py), so
that nothing but scheduling and sending takes time.  The sides are `stream_interval: 1` and the default, "auto", or the
numbers of stubs and outputs: with cores to spare, responses/s grow with the stubs as long as the CPU time of a response
stays the same.  With `--base`, the first side is the code of that commit with `stream_interval: 1`, which is what
"auto" was on a GPU before 2026-11-24.  Beside more streams than it keeps up with, its responses have several tokens,
too, because they come late: `--base-streams` gives it fewer, so that each token is a response.

"sender" is the stub's busiest thread in cores.  "late" is the time from the engine's last step, by its step length, to
the last token at the client: 0 if all tokens get out as fast as they are made.
"""

from __future__ import annotations

import itertools
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import common
import paired
import serving

PARTS = ("client", "server", "stub", "keeper", "engine")


def run(side: str, arguments: dict[str, Any]) -> common.Run:
    """Run one side; `arguments` are those of the command line and `sides`."""
    one = arguments["sides"][side]
    streams, tokens, outputs = one["streams"], arguments["tokens"], one["outputs"]
    requests = [{"prompt": [300 + number % 50] * 16, "out": tokens} for number in range(streams)]
    options = {"max_num_seqs": streams, **one["options"]}
    served = serving.served(
        options, one["stubs"], arguments["step_ms"], arguments["device"], Path(one["tree"]) / "bench" / "echo_engine.py"
    )
    with served as server:
        serving.stream_all(server.grpc_address, common.short(requests), outputs)
        before, threads, own = serving.cpu_by_kind(server), serving.stub_threads(server), time.process_time()
        start = time.perf_counter()
        answers = serving.stream_all(server.grpc_address, requests, outputs)
        wall = time.perf_counter() - start
        own = time.process_time() - own
        sender = max(seconds - threads.get(thread, 0.0) for thread, seconds in serving.stub_threads(server).items())
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
        "us_per_token": 1e6 * sum(spent.get(part, 0.0) for part in PARTS) / (streams * tokens),
        "tokens_per_second": streams * tokens / wall,
        "late_ms": 1e3 * wall - tokens * arguments["step_ms"],
        "stub_cores": spent.get("stub", 0.0) / wall,
        "sender_cores": sender / wall,
        "ttft_ms_p50": 1e3 * statistics.median(answer.times[0] - answer.sent for answer in answers),
        "gap_ms_p50": common.percentile(gaps, 50),
        "gap_ms_p99": common.percentile(gaps, 99),
    }


def sides_of(args: Any, base: Path | None) -> dict[str, dict[str, Any]]:
    """Sides by name, each with its options, stubs, outputs, streams, and the checkout with its code."""

    def side(options: dict[str, Any], stubs: int = 1, outputs: int = 2) -> dict[str, Any]:
        tree = str(paired.ROOT)
        return {"options": options, "stubs": stubs, "outputs": outputs, "streams": args.streams, "tree": tree}

    grid = list(itertools.product(args.frontends or [1], args.outputs or [2]))
    if base is not None:
        streams = args.base_streams or args.streams
        old = {**side({"stream_interval": 1}), "streams": streams, "tree": str(base)}
        first = {f"{args.base}, {streams} streams, {o} outputs": {**old, "outputs": o} for o in args.outputs or [2]}
        return {**first, **{f"{s} stubs, {o} outputs": side({}, s, o) for s, o in grid}}
    if args.frontends or args.outputs:
        return {f"{stubs} stubs, {outputs} outputs": side({}, stubs, outputs) for stubs, outputs in grid}
    return {"stream_interval 1": side({"stream_interval": 1}), "auto": side({})}


def show(found: dict[str, dict[str, float]], ratios: dict[str, float]) -> None:
    first = next(iter(found))
    for unit in ("us_per_response", "us_per_token"):
        print(f"{unit:<20}" + "".join(f"{part:>9}" for part in PARTS))
        for side, figures in found.items():
            print(f"  {side:<18}" + "".join(f"{figures[f'{unit}_{part}']:9.1f}" for part in PARTS))
    for side, figures in found.items():
        gaps = f"gaps p50 {figures['gap_ms_p50']:.1f} ms, p99 {figures['gap_ms_p99']:.1f} ms"
        rates = f"{figures['tokens_per_second']:7.0f} tokens/s, {figures['responses_per_second']:7.0f} responses/s"
        cores = f"stub {figures['stub_cores']:.2f} cores, sender {figures['sender_cores']:.2f}"
        print(f"  {side:<18}{rates}, {figures['late_ms']:.0f} ms late, {gaps}, {cores}")
    for side, ratio in ratios.items():
        print(f"  CPU time of a token, {side} / {first}: {ratio:.3f}")


def main() -> None:
    if common.ran_side(run):
        return
    args = common.options(
        __doc__,
        streams=32,
        tokens=300,
        step_ms=10.0,
        rounds=3,
        device="cpu",
        frontends=dict(type=int, nargs="+", help="stubs"),
        outputs=dict(type=int, nargs="+", choices=list(serving.OUTPUTS), help="outputs of a response"),
        base=dict(help="an earlier commit, with a response for each token"),
        base_streams=dict(type=int, help="streams of that commit; by default as many"),
    )
    args.base = paired.hash_of(args.base) if args.base else None
    with paired.checked_out(args.base) if args.base else nullcontext() as base:
        sides = sides_of(args, base)
        arguments = {**vars(args), "sides": sides, "output": None}
        runs = common.alternate(
            sides,
            args.rounds,
            lambda side, _: common.in_fresh_process(
                __file__, side, arguments, paired.environment(Path(sides[side]["tree"]))
            ),
            lambda one: f"{one['responses_per_second']:7.0f} responses/s  {one['us_per_token']:6.1f} us a token",
        )
    found = common.medians(runs, *runs[next(iter(runs))][0])
    first, *others = runs
    ratios = {side: common.median_ratio(runs[side], runs[first], "us_per_token") for side in others}
    print(f"{common.machine()}, {args.streams} streams, steps of {args.step_ms:g} ms, medians of {args.rounds} runs")
    show(found, ratios)
    common.record(args, runs, medians=found, cpu_of_a_token=ratios)


if __name__ == "__main__":
    main()
