#!/usr/bin/env python3
"""Decoding tokens/s of streams whose prompts begin alike: their first blocks in common, and each with its own copy.

    python bench/shared_prefix.py [--checkpoint qwen3-0.6b-rand] [--streams 8 32] [--prefix 2048] [--output FILE]

Both sides decode the same prompts in one engine, in turns; those of `apart` have a `cache_salt` each, so that none
finds another's prefix.  Only steps in which all streams decode are timed.  The keys and values of what is in common
are read once a step; the tokens must be equal.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import common

_WARM_UP_STEPS = 5


def run(core: Any, numbers: Any, prompts: list[list[int]], salts: list[str], steps: int) -> common.Run:
    """Tokens per second while all decode, and the first tokens of each."""
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


def measure(core: Any, streams: int, args: Any) -> dict[str, Any]:
    rng, numbers = random.Random(streams), itertools.count()

    def fresh(count: int) -> list[int]:
        return [rng.randrange(3, core.info.vocab_size) for _ in range(count)]

    def one(side: str, number: int) -> common.Run:
        found = run(core, numbers, prompts[number], salts[side], args.steps)
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
        checkpoint=common.CHECKPOINT, streams=[8, 32], prefix=2048, tail=32, steps=64, kv_cache_memory="2GiB"
    )
    del sides["requests"]
    args = common.options(__doc__, **sides)
    options = {
        **common.engine_options(vars(args)),
        "model": common.checkpoint(args.checkpoint, args.dtype),
        "enable_prefix_caching": True,
        "kv_cache_memory": args.kv_cache_memory,
        "check_on_load": False,  # weights are random, and a check takes a minute
    }
    core = common.engine({**options, "max_num_seqs": max(args.streams)})
    needed = max(args.streams) * (args.prefix + args.tail + 2 * args.steps + 256)  # tokens, while prompts are computed
    if core.pool.num_blocks * core.pool.block_size < needed:
        raise SystemExit(
            f"the pool has {core.pool.num_blocks} blocks, too few for {needed} tokens: more --kv-cache-memory"
        )
    found = {streams: measure(core, streams, args) for streams in args.streams}
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
