#!/usr/bin/env python3
"""Streams that all decode, and a prompt alone, with weights in 16, 8 and 4 bits, beside other engines or a commit.

    python bench/decoding.py [--formats bfloat16 int8 int4] [--streams 1 4 16] [--base COMMIT] [--output FILE]
    python bench/decoding.py --llama-cpp FOLDER --openvino PYTHON [--formats int4 int4-head-6 int4-head-4 Q4_K_M]

In-process, on a checkpoint of Qwen3-0.6B's shape with random weights: the rate depends on the shape alone.  `--base`
runs the formats of `--base-formats` at an earlier commit, too, in alternation; `--llama-cpp` (the folder that has
`llama-batched-bench` and `llama-quantize`) and `--openvino` (a Python with openvino-genai and optimum-intel) run the
formats of those engines.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import cpu_floor
import decoding_peers
import numpy as np
import paired

FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4-head-6": {"quantization": "int4", "head_bits": 6},
    "int4-head-4": {"quantization": "int4", "head_bits": 4},
    "Q4_K_M": {},  # llama.cpp's file, in its codes
}
_WARM_UP_STEPS = 5


def run(side: str, arguments: dict[str, Any]) -> common.Run:
    """Tokens per second: `decode N` of N streams together, `prefill` of a prompt's tokens."""
    options = {
        **common.engine_options({**arguments, "dtype": "bfloat16"}),
        "model": arguments["checkpoint"],
        "max_model_len": 4096,
        "check_on_load": False,  # weights are random, and a check takes a minute
        **FORMATS[side.split()[0]],
    }
    if side == "Q4_K_M":
        options["model"] = str(decoding_peers.gguf(side, arguments))
    core = common.engine(options)
    rng = np.random.default_rng(1)
    number = iter(range(10**6))

    def add(prompt: int, output: int) -> None:
        tokens = rng.integers(300, core.info.vocab_size, prompt).tolist()
        common.add(core, next(number), tokens, max_tokens=output)

    figures = {}
    for streams in arguments["streams"]:
        for _ in range(streams):
            add(16, _WARM_UP_STEPS + arguments["steps"] + 1)
        while sum(len(delta.token_ids) for delta in core.step().deltas) < streams:
            pass
        for _ in range(_WARM_UP_STEPS):
            core.step()
        began = time.perf_counter()
        tokens = sum(sum(len(delta.token_ids) for delta in core.step().deltas) for _ in range(arguments["steps"]))
        figures[f"decode {streams}"] = tokens / (time.perf_counter() - began)
        common.drain(core)
    add(64, 1)
    common.drain(core)
    began = time.perf_counter()
    add(arguments["prompt"], 1)
    common.drain(core)
    figures["prefill"] = arguments["prompt"] / (time.perf_counter() - began)
    return figures


def show(run: common.Run) -> str:
    return "   ".join(f"{name} {value:7.1f}" for name, value in run.items())


def main() -> None:
    if common.ran_side(run):
        return
    args = common.options(
        __doc__,
        formats=dict(nargs="+", choices=list(FORMATS), default=["bfloat16", "int8", "int4"]),
        base=dict(help="an earlier commit"),
        base_formats=dict(nargs="+", choices=list(FORMATS), default=["bfloat16", "int8"]),
        llama_cpp=dict(metavar="FOLDER", help="folder of llama.cpp's programs"),
        openvino=dict(metavar="PYTHON", help="interpreter that has openvino-genai"),
        streams=[1, 4, 16],
        steps=32,
        prompt=1024,
        rounds=3,
        threads=os.cpu_count(),
    )
    checkpoint = common.checkpoint("qwen3-0.6b-rand")
    arguments = {**vars(args), "output": None, "checkpoint": checkpoint, "warm_up_steps": _WARM_UP_STEPS}
    peers = decoding_peers.names(arguments)
    for side in peers:
        decoding_peers.convert(side, arguments)
    sides = [*args.formats, *peers]
    with ExitStack() as stack:
        trees = {}
        if args.base:
            args.base = paired.hash_of(args.base)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inflight-decoding-"))) / "base"
            paired.git("worktree", "add", "--detach", "--quiet", str(folder), args.base)
            stack.callback(paired.git, "worktree", "remove", "--force", str(folder))
            paired.compile_kernels(folder)
            for name in args.base_formats:
                trees[f"{name} of {args.base}"] = folder
        sides += trees

        def one(side: str, _: int) -> common.Run:
            if side in peers:
                return decoding_peers.run(side, arguments)
            with ExitStack() as changed:
                if side in trees:
                    before = os.environ.get("PYTHONPATH")
                    os.environ["PYTHONPATH"] = paired.environment(trees[side])["PYTHONPATH"]
                    changed.callback(restore, before)
                return common.in_fresh_process(__file__, side, arguments)

        runs = common.alternate(sides, args.rounds, one, show)
    figures = list(runs[sides[0]][0])
    found = common.medians(runs, *figures)
    print(f"\n{common.machine()}, {args.threads} threads, tokens/s, medians of {args.rounds} alternating runs")
    for side in sides:
        print(f"  {side:<24} {show(found[side])}")
    ratios = {
        side: {name: common.median_ratio(runs[side.split()[0]], runs[side], name) for name in figures} for side in trees
    }
    for side, ratio in ratios.items():
        print(f"  over {side}: " + "   ".join(f"{name} {value:.3f}" for name, value in ratio.items()))
    rates = cpu_floor.measure("bf16", args.threads)
    print(f"  the machine reads {rates.read / 1e9:.1f} GB/s")
    common.record(
        args, runs, medians=found, ratios=ratios, peers=decoding_peers.versions(arguments), read_rate=rates.read
    )


def restore(path: str | None) -> None:
    if path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = path


if __name__ == "__main__":
    main()
