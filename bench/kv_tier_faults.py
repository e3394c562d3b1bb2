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


def main() -> None:
    import redis_rig
    import tier_load
    from model_entries import CHECKPOINT, killed_at_the_end, write_entry

    from inflight_tools.launcher import TritonServer

    args = common.options(__doc__, rounds=3, answers=40)
    found: dict[str, list[common.Run]] = {side: [] for side in SIDES}
    expected = answers(str(CHECKPOINT))
    streams = [range(0, SEEDS, 2), range(1, SEEDS, 2)]
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="inflight-kv-faults-") as folder:
            redis = redis_rig.RedisServer(Path(folder))
            tiers = {"shared": [{"type": "redis", "url": redis.url}], "plain": []}
            for name, listed in tiers.items():
                write_entry(Path(folder) / "models", name, kv_tiers=listed, kv_cache_memory="8MiB")
            with redis, killed_at_the_end(TritonServer(Path(folder) / "models")) as server:
                for side in SIDES:
                    model = "plain" if side == "without" else "shared"
                    with tier_load.TierLoad(server.grpc_address, model, expected, streams) as load:
                        if side == "healthy":
                            load.wait(2 * SEEDS)  # all are stored
                        {"stopped": redis.stop, "killed": redis.kill}.get(side, int)()
                        seconds = load.wait(args.answers, 20)
                    found[side].append({f"p{p}": common.percentile(seconds, p) for p in (50, 99)})
                    print(f"round {number + 1} {side:<10} {len(seconds)} canaries {found[side][-1]}", flush=True)
    summary = {
        side: {
            name: statistics.median(run[name] / base[name] for run, base in zip(runs, found["without"]))
            for name in runs[0]
        }
        for side, runs in found.items()
    }
    for side, ratios in summary.items():
        print(f"{side:<10} first token of the canary beside that without tiers: {ratios}")
    common.record(args, found, summary=summary)


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
