#!/usr/bin/env python3
"""CPU time of decode steps and of a prompt with the CPU kernels of this commit and of another, within one engine.

    python bench/kernels_paired.py --base FILE [--format int4-head-6] [--llama-cpp FOLDER] [--rounds 8] [--output FILE]

`--base` is `_cpu_kernels.so` of the other commit, which must have the same ABI.  Both libraries compute steps of the
same engine in turn, on one thread, on a checkpoint of Qwen3-0.6B's shape with random weights.  CPU time, unlike the
clock, leaves out the time for which other programs have the core: these figures hold on a shared machine, too.
`--llama-cpp` (the folder of `llama-bench`) takes the CPU time of a token of llama.cpp's Q4_K_M in the same rounds, as
the difference of two runs.  Beside them: the time in which torch's sum reads a gigabyte.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import decoding
import decoding_peers
import numpy as np

if TYPE_CHECKING:
    from inflight.engine.core import EngineCore

_STEPS = {1: 8, 4: 4, 16: 2}  # in a row, by streams


def main() -> None:
    args = common.options(
        __doc__,
        base=dict(required=True, metavar="FILE", help="the other commit's _cpu_kernels.so"),
        format=common.choice(decoding.FORMATS, "int4-head-6"),
        llama_cpp=dict(metavar="FOLDER", help="folder of llama.cpp's programs"),
        prompt=256,
        rounds=8,
    )
    import torch

    from inflight.kernels.cpu import cpu_decoder, library

    sides = {"base": _opened(args.base), "new": library.library()}
    arguments = {"checkpoint": common.checkpoint("qwen3-0.6b-rand"), "llama_cpp": args.llama_cpp}
    core = _engine(arguments["checkpoint"], args.format)
    rng, numbers, memory = np.random.default_rng(1), iter(range(10**9)), torch.ones(2**26)
    runs: dict[str, dict[str, list[float]]] = {}

    def note(case: str, side: str, seconds: float) -> None:
        runs.setdefault(case, {}).setdefault(side, []).append(1000 * seconds)

    def add(prompt: int, output: int) -> None:
        common.add(core, next(numbers), rng.integers(300, core.info.vocab_size, prompt).tolist(), max_tokens=output)

    def in_turn(case: str, number: int, work: Callable[[], float]) -> None:
        for side in list(sides) if number % 2 == 0 else reversed(sides):
            cpu_decoder.library = lambda side=side: sides[side]  # type: ignore[assignment,misc]
            note(case, side, work())

    for streams, steps in _STEPS.items():
        rounds = args.rounds if streams == 1 else (args.rounds + 1) // 2
        for _ in range(streams):
            add(16, (2 * rounds * steps) + streams + 8)
        while sum(len(delta.token_ids) for delta in core.step().deltas) < streams:
            pass
        for number in range(rounds):
            in_turn(f"decode {streams}", number, partial(_median_step, core, steps))
            if streams == 1:
                note("decode 1", "a gigabyte read", _seconds(memory.sum) / (memory.nbytes / 1e9))
            if streams == 1 and args.llama_cpp:
                note("decode 1", "llama.cpp Q4_K_M", _llama_token(arguments))
        common.drain(core)
    for number in range((args.rounds + 1) // 2):

        def prompt() -> float:
            add(args.prompt, 1)
            return _seconds(lambda: common.drain(core))

        in_turn("prefill", number, prompt)
    _show(args, runs, sides)


def _engine(checkpoint: str, name: str) -> EngineCore:
    options = {
        **common.engine_options({"dtype": "bfloat16", "threads": 1}),
        "model": checkpoint,
        "max_model_len": 4096,
        "check_on_load": False,  # weights are random, and a check takes a minute
        **decoding.FORMATS[name],
    }
    return common.engine(options)


def _opened(path: str) -> ctypes.CDLL:
    from inflight.kernels.cpu import library

    found = ctypes.CDLL(path)
    if found.inflight_abi() != library.ABI:
        raise SystemExit(f"{path} has the ABI {found.inflight_abi()}, and this commit {library.ABI}")
    for name, (kinds, result) in library._SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = kinds, result
    return found


def _median_step(core: EngineCore, steps: int) -> float:
    return statistics.median(_seconds(core.step) for _ in range(steps))


def _seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _llama_token(arguments: dict[str, Any]) -> float:
    """Seconds of CPU time: 24 tokens are the difference of two processes."""
    file = decoding_peers.convert("llama.cpp Q4_K_M", arguments)
    tool = Path(arguments["llama_cpp"]) / "llama-bench"

    def process(tokens: int) -> float:
        command = [str(tool), "-m", str(file), "-t", "1", "-p", "0", "-n", str(tokens), "-r", "1", "--no-warmup"]
        started = subprocess.Popen(
            command, env=common.peer_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(started.pid, 0)
        if status:
            raise SystemExit(f"llama-bench failed: {status}")
        return usage.ru_utime + usage.ru_stime

    return (process(28) - process(4)) / 24


def _show(args: Any, runs: dict[str, dict[str, list[float]]], sides: dict[str, ctypes.CDLL]) -> None:
    names = {side: found.inflight_instruction_set().decode() for side, found in sides.items()}
    medians = {case: {side: statistics.median(times) for side, times in found.items()} for case, found in runs.items()}
    ratios = {
        case: {
            side: statistics.median(other / ours for other, ours in zip(times, found["new"]))
            for side, times in found.items()
            if side not in ("new", "a gigabyte read")
        }
        for case, found in runs.items()
    }
    print(f"{common.machine()}, {args.format}, CPU ms, medians of alternating rounds; instruction sets: {names}")
    for case, found in medians.items():
        print(f"  {case:<10} " + "   ".join(f"{side} {value:.2f}" for side, value in found.items()))
        print(f"  {'':<10} over new: " + "   ".join(f"{side} {value:.3f}" for side, value in ratios[case].items()))
    common.record(args, runs, unit="ms of CPU time", instruction_sets=names, medians=medians, ratios=ratios)


if __name__ == "__main__":
    main()
