#!/usr/bin/env python3
"""Three real tritonservers under prompts that share prefixes: what the choice of a server is worth.

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

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common

from gateway import child, free_port
from inflight_tools.launcher import TritonServer

DEMO = Path(__file__).parents[1] / "model_repository" / "demo" / "1" / "checkpoint"
ROUTER = Path(sys.executable).with_name("vllm-router")
LOCUSTFILE = Path(__file__).parents[1] / "loadtest" / "locustfile.py"
MODEL, REPLICAS, SCENARIO = "bench", 3, "prefix-heavy"
NUM_BLOCKS = 1800  # of 16 tokens, in each server
SIDES = ("round-robin", "least-loaded", "prefix", "vllm-router")


def write_repository(folder: Path) -> Path:
    """The demo model with a KV pool that does not hold all prefixes."""
    version = folder / "repository" / MODEL / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "inflight"\ninstance_group [ { kind: KIND_CPU } ]\n')
    options = {
        "model": str(DEMO),
        "dtype": "float32",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "cpu_threads": 1,
    }
    (version / "model.json").write_text(json.dumps(options))
    return folder / "repository"


# What stands before the servers


@contextlib.contextmanager
def started(command: list[str], port: int, path: str) -> Iterator[int]:
    import httpx2

    with child(command):
        for _ in range(600):
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"http://127.0.0.1:{port}{path}").status_code == 200:
                    break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"{command[0]} did not become ready within 60 s")
        yield port


@contextlib.contextmanager
def door(tritons: list[str], *options: str) -> Iterator[int]:
    port = free_port()
    command = [str(Path(sys.executable).with_name("inflight")), "gateway", "--port", str(port), *options]
    with started([*command, *(part for one in tritons for part in ("--triton", one))], port, "/ready"):
        yield port


@contextlib.contextmanager
def side(name: str, tritons: list[str]) -> Iterator[int]:
    """The port that clients ask."""
    if name != "vllm-router":
        with door(tritons, "--routing", name) as port:
            yield port
        return
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(door([triton])) for triton in tritons]
        port = free_port()
        command = [str(ROUTER), "--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "warning"]
        command += ["--policy", "cache_aware", "--worker-urls", *(f"http://127.0.0.1:{one}" for one in doors)]
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
    """What Locust's users see in one run, and what the servers count.

    Raises:
        RuntimeError: a request failed.
    """
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(LOCUSTFILE),
        "OpenAIUser",
        "--host",
        f"http://127.0.0.1:{port}",
    ]
    command += ["--headless", "--users", str(users), "--spawn-rate", str(users), "--run-time", f"{seconds:.0f}s"]
    command += [
        "--model",
        MODEL,
        "--scenario",
        SCENARIO,
        "--requests",
        "-1",
        "--seed",
        str(seed),
        "--prompt",
        "text",
        "--tokenizer",
        str(DEMO),
        "--stop-timeout",
        "60",
    ]
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


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    ttft = sorted(1e3 * one["arrivals"][0][0] for one in answers)
    wall = max(one["start"] + one["latency"] for one in answers) - min(one["start"] for one in answers)
    return {
        "requests": len(answers),
        "prompt_tokens": statistics.fmean(one["prompt_tokens"] for one in answers),
        "ttft_ms": {"p50": ttft[len(ttft) // 2], "p99": ttft[len(ttft) * 99 // 100]},
        "tokens_per_second": sum(one["output_tokens"] for one in answers) / wall,
    }


def measure(
    servers: list[TritonServer], sides: list[str], args: argparse.Namespace, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(args.rounds):
        for place, name in enumerate(sides[number % len(sides) :] + sides[: number % len(sides)]):
            seed = 1 + number * len(sides) + place
            with side(name, [server.grpc_address for server in servers]) as port:
                one = load(port, servers, args.users, args.seconds, seed, folder / f"{seed}.jsonl")
            runs[name].append(one)
            ttft = one["ttft_ms"]
            figures = f"hits {one['hit_rate']:4.0%}  TTFT p50 {ttft['p50']:6.1f} p99 {ttft['p99']:6.1f} ms"
            print(
                f"round {number + 1}/{args.rounds}  {name:<13} {figures}  {one['tokens_per_second']:6.1f} tokens/s",
                flush=True,
            )
    return runs


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    figures: dict[str, Callable[[dict[str, Any]], float]] = {
        "hit_rate": lambda run: run["hit_rate"],
        "ttft_ms_p50": lambda run: run["ttft_ms"]["p50"],
        "ttft_ms_p99": lambda run: run["ttft_ms"]["p99"],
        "tokens_per_second": lambda run: run["tokens_per_second"],
    }
    return {name: statistics.median(map(figure, runs)) for name, figure in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=18.0, help="of each run")
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    sides = [name for name in SIDES if name != "vllm-router" or ROUTER.exists()]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        repository = write_repository(Path(folder))
        servers = [stack.enter_context(TritonServer(repository, exit_timeout=5)) for _ in range(REPLICAS)]
        runs = measure(servers, sides, args, Path(folder))
    summaries = {name: medians(own) for name, own in runs.items()}
    print(f"\n{common.machine()}, {args.users} users, medians of {args.rounds} alternating runs")
    for name, one in summaries.items():
        print(f"  {name:<13} " + "  ".join(f"{figure} {value:.3g}" for figure, value in one.items()))
    arguments = {"rounds": args.rounds, "seconds": args.seconds, "users": args.users, "scenario": SCENARIO}
    arguments |= {"replicas": REPLICAS, "blocks": NUM_BLOCKS}
    common.record(args.output, runs, arguments, medians=summaries)


if __name__ == "__main__":
    main()
