#!/usr/bin/env python3
"""Time to first token with a shared prefix of 2048 tokens: the first request and the next ones.

    python bench/prefix.py [--rounds 20] [--prefix 2048] [--tail 32] [--triton] [--output FILE]

Each round has a new random prefix.  The first request computes it (miss); the second has the same prefix and
another tail (hit); the third repeats the second under another `cache_salt` (salted): it must not find the
prefix, and must give the same output.  The engine is idle and takes one request at a time, so that only the
prefix differs.  With --triton the requests go to a real tritonserver on 127.0.0.1 over gRPC streaming, and
times are those of the client.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import serving

TOKENS = 8  # output tokens of each request
SIDES = ("miss", "hit", "salted")

# Sends a prompt under a salt; returns seconds to the first token and the output token ids.
Send = Callable[[list[int], str], tuple[float, list[int]]]


@contextlib.contextmanager
def in_process(options: dict[str, Any]) -> Iterator[Send]:
    core, numbers = common.engine(options), itertools.count()

    def send(prompt: list[int], salt: str) -> tuple[float, list[int]]:
        start = time.perf_counter()
        common.add(core, next(numbers), prompt, max_tokens=TOKENS, cache_salt=salt)
        first, tokens = 0.0, []
        while core.has_work:
            for delta in core.step().deltas:
                first = first or time.perf_counter() - start
                tokens += delta.token_ids
        return first, tokens

    yield send


@contextlib.contextmanager
def through_triton(options: dict[str, Any]) -> Iterator[Send]:
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    with serving.served(options) as server, serving.Streams(server.grpc_address) as streams:

        def send(prompt: list[int], salt: str) -> tuple[float, list[int]]:
            inputs = {"input_ids": prompt, "sampling": sampling, "return_token_ids": True, "cache_salt": salt}
            answer = streams.submit(inputs)
            streams.wait()
            return answer.times[0] - answer.sent, answer.token_ids

        yield send


def measure(send: Send, args: Any) -> tuple[dict[str, list[float]], int]:
    """Rounds of miss, hit and salted: seconds to the first token of each, and how often hit and salted agreed."""
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 30_000) for _ in range(count)]

    for number in range(2):
        send(tokens(args.prefix), f"warm-up {number}")
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    equal = 0
    for number in range(args.rounds):
        prefix, tails = tokens(args.prefix), [tokens(args.tail) for _ in range(2)]
        outputs = {}
        for side, tail, salt in (("miss", 0, ""), ("hit", 1, ""), ("salted", 1, f"round {number}")):
            first, outputs[side] = send([*prefix, *tails[tail]], salt)
            seconds[side].append(first)
        equal += outputs["hit"] == outputs["salted"]
        shown = "  ".join(f"{side} {1000 * values[-1]:7.1f} ms" for side, values in seconds.items())
        print(f"round {number + 1}/{args.rounds}  {shown}", flush=True)
    return seconds, equal


def main() -> None:
    sides = common.engine_sides(rounds=20, prefix=2048, tail=32, triton=False)
    del sides["requests"]
    args = common.options(__doc__, **sides)
    options = {**common.engine_options(vars(args)), "enable_prefix_caching": True}
    with (through_triton if args.triton else in_process)(options) as send:
        seconds, equal = measure(send, args)
    found = {side: statistics.median(values) for side, values in seconds.items()}
    ratios = [miss / hit for miss, hit in zip(seconds["miss"], seconds["hit"])]
    ratio = statistics.median(ratios)
    print(f"\n{common.machine()}, {args.dtype}, medians of {args.rounds}")
    for side in SIDES:
        print(f"  {side:<8} {1000 * found[side]:8.1f} ms to the first token")
    print(f"  miss / hit, pair by pair: {ratio:.1f}; hit and salted agreed in {equal} rounds")
    runs = {"seconds_to_first_token": seconds, "equal_outputs": equal}
    common.record(args, runs, ratio=ratio, lowest_ratio=min(ratios), median_seconds=found)


if __name__ == "__main__":
    main()
