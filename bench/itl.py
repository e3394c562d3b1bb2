#!/usr/bin/env python3
"""The effect of a long prompt on running streams: the gaps between their tokens with and without `itl_target_ms`.

    python bench/itl.py [--target-ms 40] [--streams 8] [--prompt 12000] [--rounds 3] [--output FILE]

In-process.  Streams decode, a prompt arrives, and the gaps of the streams are measured from its arrival to
its first token.  "alone" is the engine with the target and without the prompt, as a baseline.  The checkpoint
is that of the other benchmarks, with more positions if the prompt needs them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

SIDES = ("alone", "static", "target")
_WARM_UP_PROMPT = 512  # shows the cost model prompts beside decodes before the measurement
_SECONDS_ALONE = 5.0
_ROOM_TO_DECODE = 2048  # positions for the streams beyond those of the long prompt


def checkpoint(dtype: str, positions: int) -> str:
    """Directory of the benchmarks' checkpoint with at least that many positions; rotary embeddings have no limit."""
    source = Path(common.checkpoint(dtype=dtype))
    config = json.loads((source / "config.json").read_text())
    if config["max_position_embeddings"] >= positions:
        return str(source)
    path = source.with_name(f"{source.name}-{positions}")
    path.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.name != "config.json" and not (path / file.name).exists():
            (path / file.name).symlink_to(file)
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    return str(path)


def run(side: str, arguments: dict[str, Any]) -> common.Run:
    model = checkpoint(arguments["dtype"], arguments["prompt"] + _ROOM_TO_DECODE)
    options = {**common.engine_options(arguments), "model": model, "max_num_batched_tokens": 512}
    del options["max_num_seqs"]
    if side != "static":
        options["itl_target_ms"] = arguments["target_ms"]
    core = common.engine(options)
    rng = np.random.default_rng(1)

    def add(request_id: int, prompt: int, output: int) -> None:
        tokens = rng.integers(300, core.info.vocab_size, prompt).tolist()
        common.add(core, request_id, tokens, max_tokens=output)

    for stream in range(arguments["streams"]):
        add(stream, 64, core.info.max_model_len)
    for _ in range(20):
        core.step()
    add(1000, _WARM_UP_PROMPT, 1)
    for _ in range(20 + arguments["warm_up_steps"]):
        core.step()

    if side != "alone":
        add(2000, arguments["prompt"], 1)
    began = last = time.perf_counter()
    until = began + _SECONDS_ALONE if side == "alone" else float("inf")
    gaps: list[float] = []
    while True:
        deltas = core.step().deltas
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
        if now > until or any(delta.request_id == 2000 for delta in deltas):
            break
    p50, p99 = (1000 * float(value) for value in np.percentile(gaps, (50, 99)))
    return {
        "itl_p50_ms": p50,
        "itl_p99_ms": p99,
        "itl_max_ms": 1000 * max(gaps),
        "steps": len(gaps),
        "ttft_of_the_prompt_s": None if side == "alone" else last - began,
    }


def main() -> None:
    if common.ran_side(run):
        return
    sides = common.engine_sides(target_ms=40.0, streams=8, prompt=dict(type=int, default=12_000, help="tokens"))
    del sides["requests"]
    args = common.options(__doc__, **sides)
    arguments = {**vars(args), "output": None, "warm_up_steps": 60}
    checkpoint(args.dtype, args.prompt + _ROOM_TO_DECODE)
    runs = common.alternate(SIDES, args.rounds, lambda side, _: common.in_fresh_process(__file__, side, arguments), str)
    print(f"\n{common.machine()}, {args.dtype}, target {args.target_ms:g} ms, medians of {args.rounds}")
    found = common.medians(runs, "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "ttft_of_the_prompt_s")
    for side, figures in found.items():
        print(f"  {side:<8} " + "  ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    rise = found["target"]["itl_p99_ms"] - found["alone"]["itl_p99_ms"]
    longer = found["target"]["ttft_of_the_prompt_s"] / found["static"]["ttft_of_the_prompt_s"]
    print(f"  with the target the prompt raises the ITL p99 by {rise:.1f} ms and waits {longer:.2f} times as long")
    common.record(args, runs, medians=found, itl_p99_rise_ms=rise, ttft_over_static=longer)


if __name__ == "__main__":
    main()
