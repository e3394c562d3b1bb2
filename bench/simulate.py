#!/usr/bin/env python3
"""Validates the simulator: predicted throughput compared with measured throughput.

    python bench/simulate.py [--rounds 3] [--users 16] [--threads N] [--output FILE]

On the demo checkpoint.  Each round calibrates, predicts a closed loop of the scenario lognormal (scaled
to the checkpoint's context), and runs it.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import common

SIDE = "both"


def run(arguments: dict[str, Any]) -> dict[str, Any]:
    import msgspec

    from inflight.config import EngineConfig
    from inflight_tools.simulator.calibrate import calibrate, load_engine
    from inflight_tools.simulator.check import compare
    from inflight_tools.workload.load import Load

    entry = Path(__file__).parents[1] / "model_repository" / "demo" / "1" / "model.json"
    config = msgspec.structs.replace(EngineConfig.from_file(entry), cpu_threads=arguments["threads"])
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


def main() -> None:
    if "--side" in sys.argv:
        print(json.dumps(run(json.load(sys.stdin))))
        return
    parser = common.parser(__doc__.splitlines()[0])
    parser.set_defaults(requests=96, dtype="float32")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of calibration per round")
    args = parser.parse_args()
    arguments = {"threads": args.threads, "requests": args.requests, "users": args.users, "seconds": args.seconds}
    runs = []
    for number in range(args.rounds):
        runs.append(common.in_fresh_process(__file__, SIDE, arguments))
        one = runs[-1]
        print(
            f"round {number + 1}/{args.rounds}  predicted {one['predicted']['tokens_per_second']:.0f} tokens/s, "
            f"measured {one['measured']['tokens_per_second']:.0f}, ratio {one['ratio']:.3f}",
            flush=True,
        )
    ratio = statistics.median(one["ratio"] for one in runs)
    print(f"\n{common.machine()}, demo checkpoint, median of {args.rounds} rounds\n  predicted / measured: {ratio:.3f}")
    common.record(args.output, {SIDE: runs}, arguments, ratio=ratio)


if __name__ == "__main__":
    main()
