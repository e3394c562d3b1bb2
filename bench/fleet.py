#!/usr/bin/env python3
"""Three real tritonservers under prompts that share prefixes: the value of choosing a server.

    python bench/fleet.py [--rounds 5] [--seconds 18] [--users 6] [--output FILE]

Locust's users (loadtest/locustfile.py) ask one request after the other from the scenario `prefix-heavy`, streaming:
64 texts of 1,024 tokens, by Zipf's law, each with a tail of its own.  They do not fit into the KV blocks of one server,
but a third of them does.  The sides alternate: a gateway with `--routing` round-robin, least-loaded and prefix, and
vllm-router (cache-aware), if it is installed, before a gateway for each server.  Each run has new texts.  The hit rate
is the share of prompt tokens that the servers found in their prefix caches; the first third of a run does not count.
All processes share the machine's cores, so a token that is not computed leaves time for others.  A failed request
fails the benchmark.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import serving

from gateway import child, free_port, wait_for
from inflight_tools.launcher import TritonServer

ROUTER = Path(sys.executable).with_name("vllm-router")
LOCUSTFILE = Path(__file__).parents[1] / "loadtest" / "locustfile.py"
MODEL, REPLICAS, SCENARIO = serving.MODEL, 3, "prefix-heavy"
FIGURES = ("hit_rate", "ttft_ms_p50", "ttft_ms_p99", "tokens_per_second")
NUM_BLOCKS = 1800  # of 16 tokens, in each server
SIDES = ("round-robin", "least-loaded", "prefix", "vllm-router")


OPTIONS = {
    "model": str(common.DEMO),
    "dtype": "float32",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": NUM_BLOCKS,  # do not hold all prefixes
    "cpu_threads": 1,
}


# In front of the servers


@contextlib.contextmanager
def started(command: list[str], port: int, path: str) -> Iterator[int]:
    with child(command):
        wait_for(f"http://127.0.0.1:{port}{path}")
        yield port


@contextlib.contextmanager
def gateway(tritons: list[str], *options: str) -> Iterator[int]:
    port = free_port()
    command = [str(Path(sys.executable).with_name("inflight")), "gateway", "--port", str(port), *options]
    with started([*command, *(part for one in tritons for part in ("--triton", one))], port, "/ready"):
        yield port


@contextlib.contextmanager
def side(name: str, tritons: list[str]) -> Iterator[int]:
    """The port that clients ask."""
    if name != "vllm-router":
        with gateway(tritons, "--routing", name) as port:
            yield port
        return
    with contextlib.ExitStack() as stack:
        gateways = [stack.enter_context(gateway([triton])) for triton in tritons]
        port = free_port()
        command = [str(ROUTER), "--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "warning"]
        command += ["--policy", "cache_aware", "--worker-urls", *(f"http://127.0.0.1:{one}" for one in gateways)]
        yield stack.enter_context(started(command, port, "/v1/models"))


# The load


def prefix_tokens(servers: list[TritonServer]) -> tuple[float, float]:
    """Prompt tokens that all servers have looked up in their prefix caches so far, and found there."""
    import httpx2

    sums = []
    for name in ("queries", "hits"):
        pattern = re.compile(rf"^vllm:prefix_cache_{name}_total\S* (\S+)$", re.MULTILINE)
        texts = [httpx2.get(f"http://{server.metrics_address}/metrics").text for server in servers]
        sums.append(sum(float(value) for text in texts for value in pattern.findall(text)))
    return sums[0], sums[1]


def load(port: int, servers: list[TritonServer], users: int, seconds: float, seed: int, record: Path) -> dict[str, Any]:
    """The figures of Locust's users in one run, and the counts of the servers.

    Raises:
        RuntimeError: a request failed.
    """
    users_of = f"OpenAIUser --headless --users {users} --spawn-rate {users} --run-time {seconds:.0f}s --stop-timeout 60"
    work = f"--model {MODEL} --scenario {SCENARIO} --requests -1 --seed {seed} --prompt text"
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *users_of.split(), *work.split()]
    command += ["--host", f"http://127.0.0.1:{port}", "--tokenizer", str(common.DEMO)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, "--record", str(record)], stdout=log, stderr=log)
        while process.poll() is None and not (record.exists() and record.read_text()):
            time.sleep(0.1)
        time.sleep(seconds / 3)
        before = prefix_tokens(servers)
        status = process.wait()
        after = prefix_tokens(servers)
        log.seek(0)
        rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        requests = [row for row in rows if "index" in row]
        if status or not requests or any(row["error"] for row in requests):
            raise RuntimeError(f"a request failed: {log.read()[-2000:]}")
    looked_up, found = (now - then for now, then in zip(after, before))
    return {"hit_rate": found / looked_up, **summary([row for row in requests if row["start"] >= seconds / 3])}


def summary(answers: list[dict[str, Any]]) -> common.Run:
    ttft = sorted(1e3 * one["arrivals"][0][0] for one in answers)
    wall = max(one["start"] + one["latency"] for one in answers) - min(one["start"] for one in answers)
    return {
        "requests": len(answers),
        "prompt_tokens": statistics.fmean(one["prompt_tokens"] for one in answers),
        "ttft_ms_p50": common.percentile(ttft, 50),
        "ttft_ms_p99": common.percentile(ttft, 99),
        "tokens_per_second": sum(one["output_tokens"] for one in answers) / wall,
    }


def main() -> None:
    args = common.options(__doc__, rounds=5, seconds=18.0, users=6)
    sides = [name for name in SIDES if name != "vllm-router" or ROUTER.exists()]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving.served(OPTIONS)) for _ in range(REPLICAS)]

        def run(name: str, number: int) -> common.Run:
            seed = 1 + number * len(sides) + sides.index(name)
            with side(name, [server.grpc_address for server in servers]) as port:
                return load(port, servers, args.users, args.seconds, seed, Path(folder) / f"{seed}.jsonl")

        runs = common.alternate(sides, args.rounds, run, _shown)
    found = common.medians(runs, *FIGURES)
    print(f"\n{common.machine()}, {args.users} users, medians of {args.rounds} alternating runs")
    for name, one in found.items():
        print(f"  {name:<13} " + "  ".join(f"{figure} {value:.3g}" for figure, value in one.items()))
    common.record(args, runs, medians=found, scenario=SCENARIO, replicas=REPLICAS, blocks=NUM_BLOCKS)


def _shown(run: common.Run) -> str:
    ttft = f"TTFT p50 {run['ttft_ms_p50']:6.1f} p99 {run['ttft_ms_p99']:6.1f} ms"
    return f"hits {run['hit_rate']:4.0%}  {ttft}  {run['tokens_per_second']:6.1f} tokens/s"


if __name__ == "__main__":
    main()
