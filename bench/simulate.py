#!/usr/bin/env python3
"""Validates the simulator: predicted throughput compared with measured throughput.

    python bench/simulate.py [--rounds 3] [--users 16] [--threads N] [--output FILE]

On the demo checkpoint.  Each round calibrates, predicts a closed loop of the scenario lognormal (scaled
to the checkpoint's context), and runs it.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import common

SIDE = "both"


def run(arguments: dict[str, Any]) -> dict[str, Any]:
    import msgspec

    from inflight.model_json import read_model_json
    from inflight_tools.simulator.calibrate import calibrate, load_engine
    from inflight_tools.simulator.check import compare
    from inflight_tools.workload.load import Load

    entry = common.DEMO.parent / "model.json"
    config = msgspec.structs.replace(read_model_json(entry), cpu_threads=arguments["threads"])
    core = load_engine(config)
    profile = calibrate(core, "demo", arguments["seconds"])
    load = Load("lognormal", requests=arguments["requests"], context=core.info.max_model_len)
    predicted, measured = compare(core, profile, load, arguments["users"])
    return {
        "ratio": predicted.tokens_per_second / measured.tokens_per_second,
        "fit": msgspec.to_builtins(profile.fit),
        **{
            name: {"tokens_per_second": one.tokens_per_second, **msgspec.to_builtins(one)}
            for name, one in (("predicted", predicted), ("measured", measured))
        },
    }


def shown(one: common.Run) -> str:
    predicted, measured = (one[side]["tokens_per_second"] for side in ("predicted", "measured"))
    return f"predicted {predicted:.0f} tokens/s, measured {measured:.0f}, ratio {one['ratio']:.3f}"


def main() -> None:
    if common.ran_side(lambda side, arguments: run(arguments)):
        return
    seconds = dict(type=float, default=15.0, help="seconds of calibration per round")
    args = common.options(__doc__, threads=os.cpu_count(), requests=96, rounds=3, users=16, seconds=seconds)
    arguments = {**vars(args), "output": None}
    runs = common.alternate(
        [SIDE], args.rounds, lambda side, _: common.in_fresh_process(__file__, side, arguments), shown
    )[SIDE]
    ratio = statistics.median(one["ratio"] for one in runs)
    print(f"\n{common.machine()}, demo checkpoint, median of {args.rounds} rounds\n  predicted / measured: {ratio:.3f}")
    common.record(args, {SIDE: runs}, ratio=ratio)


if __name__ == "__main__":
    main()
