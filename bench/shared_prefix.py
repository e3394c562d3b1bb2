#!/usr/bin/env python3
"""Decoding tokens/s of streams whose prompts begin alike: their first blocks in common, and each with its own copy.

    python bench/shared_prefix.py [--streams 8 32] [--prefix 2048] [--triton] [--checkpoint NAME] [--output FILE]

Both sides decode the same prompts in one engine, in turns; those of `apart` have a `cache_salt` each, so that none
finds another's prefix.  Only steps in which all streams decode are timed.  Keys and values that they have in common
are read once a step; the tokens must be equal.  With --triton the requests go to a real tritonserver over one gRPC
stream, their prompts are computed before, and the time is that from the first request to the last response.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import serving

_WARM_UP_STEPS = 5


# Prompts, their salts, and a number of steps -> tokens per second while all decode, and the first tokens of each.
Run = Callable[[list[list[int]], list[str], int], common.Run]


def in_process(core: Any, numbers: Any, prompts: list[list[int]], salts: list[str], steps: int) -> common.Run:
    """`Run` with the first two."""
    ids = [next(numbers) for _ in prompts]
    most = core.info.max_model_len - len(prompts[0])  # they are aborted
    for request_id, prompt, salt in zip(ids, prompts, salts):
        common.add(core, request_id, prompt, max_tokens=most, cache_salt=salt)
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}

    def step() -> None:
        for delta in core.step().deltas:
            tokens[delta.request_id] += delta.token_ids

    while not all(tokens.values()):
        step()
    for _ in range(_WARM_UP_STEPS):
        step()
    began, before = time.perf_counter(), sum(map(len, tokens.values()))
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - began
    decoded = sum(map(len, tokens.values())) - before
    assert decoded == steps * len(prompts), "a stream ended, or waited"
    for request_id in ids:
        core.abort(request_id)
    common.drain(core)
    return {"tokens_per_second": decoded / seconds, "tokens": [tokens[request_id][:steps] for request_id in ids]}


def through_triton(streams: Any, prompts: list[list[int]], salts: list[str], steps: int) -> common.Run:
    """`Run` with the first one."""

    def submit(count: int) -> list[serving.Answer]:
        sampling = {"temperature": 0, "max_tokens": count, "ignore_eos": True}
        inputs = {"sampling": sampling, "return_token_ids": True}
        answers = [
            streams.submit({**inputs, "sampling": dict(sampling), "input_ids": prompt, "cache_salt": salt})
            for prompt, salt in zip(prompts, salts)
        ]
        streams.wait(len(answers))
        return answers

    submit(1)
    answers = submit(steps)
    seconds = max(answer.times[-1] for answer in answers) - answers[0].sent
    return {"tokens_per_second": steps * len(prompts) / seconds, "tokens": [answer.token_ids for answer in answers]}


@contextlib.contextmanager
def engine(options: dict[str, Any], args: Any) -> Iterator[Run]:
    if args.triton:
        with serving.served(options) as server, serving.Streams(server.grpc_address) as streams:
            yield functools.partial(through_triton, streams)
        return
    core = common.engine(options)
    needed = max(args.streams) * (args.prefix + args.tail + 2 * args.steps + 256)  # tokens; prompts come one by one
    if core.pool.num_blocks * core.pool.block_size < needed:
        raise SystemExit(
            f"the pool has {core.pool.num_blocks} blocks, too few for {needed} tokens: more --kv-cache-memory"
        )
    yield functools.partial(in_process, core, itertools.count())


def measure(run: Run, streams: int, args: Any) -> dict[str, Any]:
    rng = random.Random(streams)

    def fresh(count: int) -> list[int]:
        return [rng.randrange(3, 30_000) for _ in range(count)]

    def one(side: str, number: int) -> common.Run:
        found = run(prompts[number], salts[side], args.steps)
        outputs.setdefault(number, []).append(found.pop("tokens"))
        return found

    prompts = []
    for _ in range(args.rounds):
        prefix = fresh(args.prefix)
        prompts.append([prefix + fresh(args.tail) for _ in range(streams)])
    salts = {"apart": [str(number) for number in range(streams)], "in common": [""] * streams}
    outputs: dict[int, list[list[list[int]]]] = {}
    runs = common.alternate(salts, args.rounds, one)
    equal = [one == other for one, other in outputs.values()]
    return {
        "ratio": common.median_ratio(runs["in common"], runs["apart"]),
        "tokens_per_second": {side: common.median(found) for side, found in runs.items()},
        "equal": all(equal),
        "runs": runs,
    }


def main() -> None:
    sides = common.engine_sides(
        checkpoint=common.CHECKPOINT,
        streams=[8, 32],
        prefix=2048,
        tail=32,
        steps=64,
        kv_cache_memory="2GiB",
        triton=False,
    )
    del sides["requests"]
    args = common.options(__doc__, **sides)
    options = {
        **common.engine_options(vars(args)),
        "model": common.checkpoint(args.checkpoint, args.dtype),
        "enable_prefix_caching": True,
        "kv_cache_memory": args.kv_cache_memory,
        "max_num_seqs": max(args.streams),
        "check_on_load": False,  # weights are random, and a check takes a minute
    }
    with engine(options, args) as run:
        found = {streams: measure(run, streams, args) for streams in args.streams}
    print(f"\n{common.machine()}, {args.dtype}, a prefix of {args.prefix} tokens, medians of {args.rounds} rounds")
    for streams, row in found.items():
        rates = ", ".join(f"{side} {rate:.1f}" for side, rate in row["tokens_per_second"].items())
        print(f"  {streams} streams: {rates} tokens/s: {row['ratio']:.2f}x{'' if row['equal'] else '; outputs differ'}")
    runs = {streams: row.pop("runs") for streams, row in found.items()}
    common.record(args, runs, streams=found)
    if not all(row["equal"] for row in found.values()):
        raise SystemExit("outputs differ")


if __name__ == "__main__":
    main()
