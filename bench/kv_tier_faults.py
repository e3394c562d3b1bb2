#!/usr/bin/env python3
"""KV tiers whose Redis stops and dies: the first token of a canary beside conversations that return.

    python bench/kv_tier_faults.py [--rounds 3] [--answers 40] [--output FILE]

Two streams go round twelve conversations of 1,300 tokens, for whose KV the pool has no room; a third stream sends a
prompt of five tokens all the time.  Every answer must be that of an engine without tiers.  The demo model, one core for
each engine, and a `redis-server`.

    without     no tiers: each conversation is computed
    healthy     from Redis
    stopped     SIGSTOP: connections stay, and no answer comes
    killed      SIGKILL: connections are refused
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

sys.path.append(str(common.ROOT / "tests" / "support"))
SIDES = ("without", "healthy", "stopped", "killed")
SEEDS = 12
PERCENTS = (50, 90, 99)
MOST_SECONDS = 90.0  # of a side


def main() -> None:
    import redis_rig
    from model_entries import CHECKPOINT, killed_at_the_end, write_entry

    from inflight_tools.launcher import TritonServer

    args = common.options(__doc__, rounds=3, answers=40)
    rounds: list[dict[str, common.Run]] = []
    attempts = common.Attempts()
    expected = answers(str(CHECKPOINT))
    for number in range(args.rounds):
        rounds.append({})
        with attempts.at(f"round {number + 1}"), tempfile.TemporaryDirectory(prefix="inflight-kv-faults-") as folder:
            redis = redis_rig.RedisServer(Path(folder))
            tiers = {"shared": [{"type": "redis", "url": redis.url}], "plain": []}
            for name, listed in tiers.items():
                write_entry(Path(folder) / "models", name, kv_tiers=listed, kv_cache_memory="8MiB")
            with redis, killed_at_the_end(TritonServer(Path(folder) / "models")) as server:
                for side in SIDES:
                    with attempts.at(f"round {number + 1}, {side}"):
                        rounds[-1][side] = one_side(side, server.grpc_address, redis, expected, args.answers)
                        print(f"round {number + 1} {side:<10} {rounds[-1][side]}", flush=True)
        common.record(args, rounds, summary=summary_of(rounds), failed=attempts.failed)
    for side, ratios in summary_of(rounds).items():
        print(f"{side:<10} first token of the canary beside that without tiers: {ratios}")
    attempts.end()


def one_side(side: str, address: str, redis: Any, expected: dict[int | None, list[int]], answers: int) -> common.Run:
    """Seconds to the first token of canaries, in percentiles, and how many there were."""
    import tier_load

    streams = [range(0, SEEDS, 2), range(1, SEEDS, 2)]
    with tier_load.TierLoad(address, "plain" if side == "without" else "shared", expected, streams) as load:
        if side == "healthy":
            load.wait(2 * SEEDS, timeout=MOST_SECONDS)  # all are stored
        {"stopped": redis.stop, "killed": redis.kill}.get(side, int)()
        seconds = load.wait(answers, 20, MOST_SECONDS)
    return {**{f"p{percent}": common.percentile(seconds, percent) for percent in PERCENTS}, "canaries": len(seconds)}


def summary_of(rounds: list[dict[str, common.Run]]) -> dict[str, dict[str, float]]:
    """By side, the medians of its ratios to `without` in the same round."""
    found = {}
    for side in SIDES:
        pairs = [(runs[side], runs["without"]) for runs in rounds if side in runs and "without" in runs]
        if pairs:
            names = [f"p{percent}" for percent in PERCENTS]
            found[side] = {name: statistics.median(run[name] / base[name] for run, base in pairs) for name in names}
    return found


def answers(checkpoint: str) -> dict[int | None, list[int]]:
    """Of an engine in this process, without tiers, by the seed of the conversation; None: of the canary."""
    import tier_load

    core = common.engine(
        {"model": checkpoint, "dtype": "float32", "device": "cpu", "cpu_threads": 1, "kv_cache_memory": "16MiB"}
    )
    prompts: dict[int | None, list[int]] = {seed: tier_load.conversation(seed) for seed in range(SEEDS)}
    prompts[None] = tier_load.CANARY
    found: dict[int | None, list[int]] = {}
    for number, (seed, prompt) in enumerate(prompts.items()):
        common.add(core, number, prompt, max_tokens=tier_load.OUTPUT)
        found[seed] = []
        while core.has_work:
            message: Any = core.step()
            assert not message.failed, message.failed
            found[seed] += [token for delta in message.deltas for token in delta.token_ids]
    return found


if __name__ == "__main__":
    main()
