#!/usr/bin/env python3
"""A prompt that one engine has computed, and another one continues: through a peer's host memory (`kv_listen`).

    python bench/handover.py [--model llama-60m-rand] [--prompt 8000] [--rounds 5] [--threads 1] [--output FILE]

Two engine processes on this machine; all of the second one's pool has been written before.  The sides alternate, each
with a new prompt:

    computed    the second engine computes it: seconds to its first token, and its CPU time
    settled     the first engine has computed it a second ago, and does nothing: the same, and the CPU time of the first
    at once     the second engine asks as soon as the first has its token, while the extents are still written

Then the first engine decodes 8 streams, and every quarter of a second such a prompt is read from it: the gaps between
tokens that such a read meets, and the others.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import common
from kv_tiers import OUTPUT, hits, run, run_a_step, tokens

SIDES = ("computed", "settled", "at once")
STREAMS, STREAM_TOKENS, READS = 8, 700, 8
WARM_UP = 5


def options_of(args: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        **common.engine_options({"dtype": args["dtype"], "threads": args["threads"]}),
        "model": common.checkpoint(args["model"], args["dtype"]),
        "kv_cache_memory": "1GiB",
        "enable_prefix_caching": True,
        **more,
    }


def warmed(core: Any) -> Any:
    """It has learned how long computing takes."""
    for number in range(3):
        common.add(core, 10**6 + number, tokens(600, os.getpid() * 100 + number), max_tokens=OUTPUT, cache_salt="w")
        run(core)
    return core


def serve(args: dict[str, Any]) -> None:
    """The first engine: does what it reads from stdin, and answers."""
    tier = {"type": "host", "size": "1GiB"}
    core = warmed(common.engine(options_of(args, kv_tiers=[tier], kv_listen=args["listen"])))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any = time.process_time()
        if "prefill" in asked:
            common.add(core, asked["prefill"], tokens(args["prompt"], asked["prefill"]), max_tokens=1)
            came = run(core)
            answer = {"token": came[asked["prefill"]][0][1][0], "cpu": time.process_time()}
        elif "streams" in asked:
            answer = gaps_of_streams(core)
        print(json.dumps(answer), flush=True)


def gaps_of_streams(core: Any) -> list[tuple[float, float]]:
    """The tokens' steps: from, to."""
    for number in range(STREAMS):
        common.add(core, number, tokens(40, 9000 + number), max_tokens=STREAM_TOKENS)
    ends = []
    while core.has_work:
        run_a_step(core)
        ends.append(time.perf_counter())
    return list(itertools.pairwise(ends))


class FirstEngine:
    """The process of `serve`."""

    def __init__(self, args: dict[str, Any]) -> None:
        command = [sys.executable, __file__, "--serve", json.dumps(args)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()

    def ask(self, **question: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def cpu(self) -> float:
        self.ask(cpu=True)
        return float(self.answer())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def handover(core: Any, first: FirstEngine, side: str, number: int, args: dict[str, Any]) -> common.Run:
    before, prompt = first.cpu(), [*tokens(args["prompt"], number), 5]
    if side != "computed":
        first.ask(prefill=number)
        said = first.answer()
        before, prompt[-1] = said["cpu"], said["token"]
    if side == "settled":
        time.sleep(1.0)
        before = first.cpu()
    found = hits(core)
    start, cpu = time.perf_counter(), time.process_time()
    common.add(core, number, prompt, max_tokens=OUTPUT)
    came = run(core, until=number)
    took = {"seconds": came[number][0][0] - start, "cpu_seconds": time.process_time() - cpu}
    run(core)
    return {**took, "first_cpu_seconds": first.cpu() - before, "hits": hits(core) - found}


def reads_beside_streams(core: Any, first: FirstEngine, args: dict[str, Any]) -> dict[str, float]:
    first.ask(prefill=7)
    first.answer()
    time.sleep(1.0)
    tiers, reads = core.info.tiers, []
    tier = tiers.tiers[0]
    prompt = tokens(args["prompt"], 7)
    common.add(core, 7, prompt, max_tokens=1)
    run(core)
    keys = list(tier._kept)[-(args["prompt"] // (16 * tiers.extent_blocks)) :]
    memory = memoryview(bytearray(tiers.extent_blocks * tiers.blocks.bytes_per_block))
    first.ask(streams=True)
    time.sleep(0.5)
    for _ in range(READS):
        begun = time.perf_counter()
        num = sum(tier._read(key, [memory]) for key in keys)
        assert num == len(keys), (num, len(keys))
        reads.append((begun, time.perf_counter()))
        time.sleep(0.25)
    gaps = first.answer()
    assert gaps[-1][1] > reads[-1][1], "the streams end before the reads"
    meets = [end - start for start, end in gaps if any(start < stop and end > begin for begin, stop in reads)]
    other = [
        end - start
        for start, end in gaps
        if start > reads[0][0] - 0.25
        and end < reads[-1][1]
        and not any(start < stop and end > begin for begin, stop in reads)
    ]
    return {
        "read_seconds": statistics.median(stop - begin for begin, stop in reads),
        **{f"{name}_p50": statistics.median(gaps) for name, gaps in (("beside", meets), ("other", other))},
        **{f"{name}_longest": max(gaps) for name, gaps in (("beside", meets), ("other", other))},
        "beside_gaps": len(meets),
        "other_gaps": len(other),
    }


def main() -> None:
    if "--serve" in sys.argv:
        return serve(json.loads(sys.argv[-1]))
    parsed = common.options(
        __doc__,
        model=common.choice(["llama-60m-rand", "qwen3-0.6b-rand"], "llama-60m-rand"),
        dtype=common.choice(["bfloat16", "float32"], "bfloat16"),
        prompt=8000,
        rounds=5,
        threads=1,
        pool="256MiB",
        port=dict(type=int, default=0, help="of the first engine; 0: a free one"),
    )
    args = {name: value for name, value in vars(parsed).items() if name != "output"}
    args["listen"] = f"127.0.0.1:{parsed.port or free_port()}"
    common.checkpoint(parsed.model, parsed.dtype)
    found: dict[str, list[common.Run]] = {side: [] for side in SIDES}
    beside: dict[str, float] = {}
    attempts, first = common.Attempts(), FirstEngine(args)
    try:
        tiers = [{"type": "peer", "url": f"tcp://{args['listen']}"}]
        core = warmed(common.engine(options_of(args, kv_tiers=tiers, kv_cache_memory=args["pool"])))
        for number in range(WARM_UP):  # the first write of a page of the pool takes as long as all the rest
            handover(core, first, SIDES[1], number, args)
        with attempts.at("handover"):
            for number in range(parsed.rounds):
                for place, side in enumerate(SIDES):
                    found[side].append(handover(core, first, side, 100 + 10 * number + place, args))
                    print(side, {name: round(value, 4) for name, value in found[side][-1].items()}, flush=True)
        with attempts.at("beside streams"):
            beside = reads_beside_streams(core, first, args)
            print(beside)
    finally:
        first.close()
    whole = {side: runs for side, runs in found.items() if runs}
    medians = common.medians(whole, "seconds", "cpu_seconds", "first_cpu_seconds", "hits")
    for side, figures in medians.items():
        print(side, figures)
    common.record(parsed, found, medians=medians, beside_streams=beside, failed=attempts.failed)
    attempts.end()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
