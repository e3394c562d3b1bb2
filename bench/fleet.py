#!/usr/bin/env python3
"""Three real tritonservers under prompts that share prefixes: what the choice of a server is worth.

    python bench/fleet.py [--rounds 5] [--seconds 12] [--users 6] [--output FILE]

The prefixes do not fit into the KV blocks of one server, but a third of them does.  Users ask one request after the
other for a random prefix with a tail of their own, streaming.  The sides alternate: a gateway with `--routing`
round-robin, least-loaded and prefix, and vllm-router (cache-aware), if it is installed, before a gateway for each
server.  Each run has new prefixes.  The hit rate is the share of prompt tokens that answers report as cached; what
comes in the first third of a run does not count.  All processes share the machine's cores, so a token that is not
computed leaves time for others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
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
MODEL, REPLICAS, TOKENS = "bench", 3, 16
PREFIXES, PREFIX_WORDS, TAIL_WORDS = 24, 330, 8
NUM_BLOCKS = 900  # of 16 tokens, in each server
SIDES = ("round-robin", "least-loaded", "prefix", "vllm-router")
TEXT = "the list of names and places where people live return number value string index file line key path"


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


class Prompts:
    """Prompts of one run: nobody else has its prefixes."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._prefixes = [self._words(PREFIX_WORDS) for _ in range(PREFIXES)]

    def _words(self, count: int) -> str:
        return " ".join(self._draw.choices(TEXT.split(), k=count))

    def next(self) -> str:
        return f"{self._draw.choice(self._prefixes)} {self._words(TAIL_WORDS)}"


async def ask(port: int, prompt: str) -> dict[str, float]:
    """One streamed request: seconds to the first token and to the end, and what it counted."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    begun, first, usage = time.perf_counter(), 0.0, {}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    async for line in reader:
        if line.startswith(b'data: {"id"'):
            first = first or time.perf_counter()
            if b'"usage":{' in line:
                usage = json.loads(line[6:])["usage"]
    writer.close()
    if not usage:
        raise RuntimeError("a stream ended without its usage")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "begun": begun,
        "ttft": first - begun,
        "end": time.perf_counter(),
        "cached": cached,
        "prompt": usage["prompt_tokens"],
        "output": usage["completion_tokens"],
    }


async def load(port: int, users: int, seconds: float, seed: int) -> dict[str, Any]:
    prompts, found = Prompts(seed), []
    start = time.perf_counter()

    async def user() -> None:
        while time.perf_counter() < start + seconds:
            found.append(await ask(port, prompts.next()))

    await asyncio.gather(*[user() for _ in range(users)])
    return summary([one for one in found if one["begun"] >= start + seconds / 3])


def summary(answers: list[dict[str, float]]) -> dict[str, Any]:
    ttft = sorted(1e3 * one["ttft"] for one in answers)
    wall = max(one["end"] for one in answers) - min(one["begun"] for one in answers)
    return {
        "requests": len(answers),
        "hit_rate": sum(one["cached"] for one in answers) / sum(one["prompt"] for one in answers),
        "prompt_tokens": statistics.fmean(one["prompt"] for one in answers),
        "ttft_ms": {"p50": ttft[len(ttft) // 2], "p99": ttft[len(ttft) * 99 // 100]},
        "tokens_per_second": sum(one["output"] for one in answers) / wall,
    }


def measure(tritons: list[str], sides: list[str], args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(args.rounds):
        for place, name in enumerate(sides[number % len(sides) :] + sides[: number % len(sides)]):
            with side(name, tritons) as port:
                one = asyncio.run(load(port, args.users, args.seconds, number * len(sides) + place))
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
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run")
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    sides = [name for name in SIDES if name != "vllm-router" or ROUTER.exists()]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        repository = write_repository(Path(folder))
        servers = [stack.enter_context(TritonServer(repository, exit_timeout=5)) for _ in range(REPLICAS)]
        runs = measure([server.grpc_address for server in servers], sides, args)
    summaries = {name: medians(own) for name, own in runs.items()}
    print(f"\n{common.machine()}, {args.users} users, medians of {args.rounds} alternating runs")
    for name, one in summaries.items():
        print(f"  {name:<13} " + "  ".join(f"{figure} {value:.3g}" for figure, value in one.items()))
    arguments = {"rounds": args.rounds, "seconds": args.seconds, "users": args.users, "prefixes": PREFIXES}
    arguments |= {"replicas": REPLICAS, "blocks": NUM_BLOCKS, "output_tokens": TOKENS}
    common.record(args.output, runs, arguments, medians=summaries)


if __name__ == "__main__":
    main()
