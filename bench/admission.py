#!/usr/bin/env python3
"""Admission by predicted peak and admission by free blocks, on a virtual clock.

    python bench/admission.py [--requests 400] [--seeds 4] [--output FILE]

The real core, scheduler, pool and policies; only the device is simulated: a step takes 8 ms plus 0.1 ms a
token and 0.05 ms a sequence.  Requests end after random numbers of tokens; the scheduler knows only
`max_tokens`.  All arrive at once, outputs are lognormal(4.5, 0.9) clipped to 5..1000, and the pool holds a
tenth of the blocks that they need together.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

import common

from inflight.config import EngineConfig
from inflight.engine.core import EngineCore
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight_tools.simulator.engine import SimulatedInfo

_EOS, _TOKEN, _BLOCK_SIZE, _MAX_MODEL_LEN = 0, 1, 16, 4096
LOADS = {"prompts of 20..400 tokens": (20, 400), "prompts of 5..50 tokens": (5, 50)}
SIDES: dict[str, dict[str, Any]] = {
    "free_blocks, watermark 0": {"admission": "free_blocks", "watermark": 0},
    "free_blocks": {"admission": "free_blocks"},
    "predicted_peak": {"admission": "predicted_peak"},
}


class _NoDevice:
    """Samples a token for every row that samples; the one at the drawn length ends the request."""

    def __init__(self, info: SimulatedInfo, lengths: list[int], num_prompt_tokens: list[int]) -> None:
        self.info = info
        self._lengths = lengths
        self._num_prompt_tokens = num_prompt_tokens
        self._request_of: dict[int, int] = {}  # by slot

    def launch(self, out: SchedulerOutput) -> StepOutput:
        for row in out.new_rows:
            self._request_of[row.slot] = row.request_id
        tokens = []
        for slot, computed, count, samples in zip(
            out.slots, out.num_computed_tokens, out.num_scheduled_tokens, out.samples
        ):
            request_id = self._request_of[slot]
            num_output_tokens = computed + count - self._num_prompt_tokens[request_id] + 1
            tokens.append(-1 if not samples else _EOS if num_output_tokens == self._lengths[request_id] else _TOKEN)
        return StepOutput(tokens)

    def collect(self, ticket: StepOutput) -> StepOutput:
        return ticket


def run(seed: int, count: int, prompt_range: tuple[int, int], max_tokens: int, options: dict[str, Any]) -> common.Run:
    rng = random.Random(seed)
    lengths = [max(5, min(1000, int(rng.lognormvariate(4.5, 0.9)))) for _ in range(count)]
    prompts = [[rng.randrange(1, 100) for _ in range(rng.randrange(*prompt_range))] for _ in range(count)]
    demand = sum((len(prompt) + length) // _BLOCK_SIZE + 1 for prompt, length in zip(prompts, lengths))
    config = EngineConfig.from_dict({"model": "none", "block_size": _BLOCK_SIZE, **options})
    info = SimulatedInfo(_MAX_MODEL_LEN, 100, max(demand // 10, _MAX_MODEL_LEN // _BLOCK_SIZE), [_EOS])
    core = EngineCore(config, _NoDevice(info, lengths, list(map(len, prompts))))
    for request_id, prompt in enumerate(prompts):
        common.add(core, request_id, prompt, max_tokens=max_tokens, ignore_eos=False)
    preemptions = [0] * count
    seconds = 0.0
    preempt = core.scheduler._preempt

    def counting(request: Any, out: SchedulerOutput) -> None:
        preemptions[request.request_id] += 1
        preempt(request, out)

    core.scheduler._preempt = counting  # type: ignore[method-assign]
    while core.has_work:
        stats = core.step().stats
        seconds += 0.008 + 0.0001 * stats.scheduled_tokens + 0.00005 * stats.batch_size
    return {
        "tokens_per_second": sum(lengths) / seconds,
        "preemptions": sum(preemptions),
        "most_of_one_request": max(preemptions),
    }


def main() -> None:
    args = common.options(__doc__, requests=400, seeds=4)
    runs: dict[str, Any] = {}
    for load, prompt_range in LOADS.items():
        for max_tokens in (256, 1024, 3000):
            name = f"{load}, max_tokens {max_tokens}"
            print(name)
            runs[name] = {}
            for side, options in SIDES.items():
                results = [run(seed, args.requests, prompt_range, max_tokens, options) for seed in range(args.seeds)]
                runs[name][side] = results
                rate, total = (statistics.mean(r[key] for r in results) for key in ("tokens_per_second", "preemptions"))
                highest = max(result["most_of_one_request"] for result in results)
                print(
                    f"  {side:<26} {rate:7.0f} tokens/s  {total:6.1f} preemptions, at most {highest:.0f} of one request"
                )
    common.record(args, runs)


if __name__ == "__main__":
    main()
