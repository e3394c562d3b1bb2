#!/usr/bin/env python3
"""The time to choose the tokens of a step on a CPU: by the compiled kernel, and by torch's operations.

    python bench/sampling.py [--rows 1 32] [--vocab 32000 151936] [--spread 3] [--rounds 9] [--output FILE]

The logits are normal with standard deviation `--spread`: at 1 nearly every token is likely, at 3 a few thousand are,
and a trained model's are more peaked still.  Both sides run in turn, and must choose the same tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import common
import numpy as np
import torch

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.registry import select_sampling
from inflight.sampling import Sampler, SamplingTable
from inflight.sampling.reference_sampling import ReferenceSampling

KINDS = {
    "temperature": SamplingParams(),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_k 50": SamplingParams(top_k=50),
    "top_k 50, top_p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "min_p 0.05": SamplingParams(min_p=0.05),
}
MIN_SECONDS = 0.02  # of a measurement


def chooser(kind: SamplingParams, logits: torch.Tensor, kernel: bool) -> Callable[[], torch.Tensor]:
    """Draws a step's tokens as the engine does, selection included."""
    rows, sampler = np.arange(len(logits)), Sampler()
    ops = select_sampling(logits.device) if kernel else ReferenceSampling()
    table = SamplingTable(*logits.shape, ops=ops)
    for row in rows:
        table.set_row(row, kind, int(row), [], 1)

    def run() -> torch.Tensor:
        return sampler(logits, table.select(rows, rows + 7)).token_ids

    return run


def milliseconds(run: Callable[[], torch.Tensor]) -> float:
    start, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < MIN_SECONDS or not count:
        run()
        count += 1
    return 1e3 * spent / count


def main() -> None:
    arguments = common.options(__doc__, rows=[1, 32], vocab=[32_000, 151_936], spread=3.0, rounds=9, threads=2)
    torch.set_num_threads(arguments.threads)
    runs: dict[str, dict[str, list[float]]] = {}
    for vocab in arguments.vocab:
        for rows in arguments.rows:
            logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * arguments.spread
            for name, kind in KINDS.items():
                sides = {"kernel": chooser(kind, logits, True), "torch": chooser(kind, logits, False)}
                assert torch.equal(sides["kernel"](), sides["torch"]()), "the two choose different tokens"
                times: dict[str, list[float]] = {side: [] for side in sides}
                for _ in range(arguments.rounds):
                    for side, run in sides.items():
                        times[side].append(round(milliseconds(run), 4))
                key = f"{rows} x {vocab}, {name}"
                runs[key] = times
                kernel, plain = (statistics.median(times[side]) for side in ("kernel", "torch"))
                print(f"{key:40} kernel {kernel:8.3f} ms   torch {plain:8.3f} ms   {plain / kernel:6.1f}x", flush=True)
    ratios = {key: statistics.median(t["torch"]) / statistics.median(t["kernel"]) for key, t in runs.items()}
    common.record(arguments, runs, ratio={key: round(value, 2) for key, value in ratios.items()})


if __name__ == "__main__":
    main()
