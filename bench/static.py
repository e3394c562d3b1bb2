#!/usr/bin/env python3
"""Inflight and Hugging Face `generate()` in padded static batches: same checkpoint, work and threads.

    python bench/static.py [--requests 128] [--rounds 3] [--dtype bfloat16] [--output FILE]

The static side takes the requests in order, eight at a time, left-padded, and decodes until the batch's longest
output is complete; only tokens that a request asked for count.  The Inflight side is the engine in-process, with
up to 32 sequences in a step.  Greedy, end of sequence ignored, all requests offered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import common


def run_static(arguments: dict[str, Any]) -> common.Run:
    sys.path.insert(0, str(common.HERE / "peers"))
    import run_hf_static

    weights = {"bfloat16": "bf16", "float32": "fp32"}[arguments["dtype"]]
    checkpoint = common.checkpoint(dtype=arguments["dtype"])
    model = run_hf_static.load({"checkpoint": checkpoint, "weights": weights, "threads": arguments["threads"]})
    requests = common.workload(arguments["requests"])
    run_hf_static.generate(model, common.short(requests))
    return common.timed(lambda: sum(map(len, run_hf_static.generate(model, requests))))


def run_inflight(
    arguments: dict[str, Any], prepare: Callable[[Any], None] = lambda llm: None, **options: Any
) -> common.Run:
    """One run of the engine in-process.

    Args:
        prepare: is given the `LLM` after its warm-up.
        options: keys of `model.json`.
    """
    from inflight import LLM, SamplingParams

    llm = LLM(**{**common.engine_options(arguments), **options})

    def generate(requests: list[dict[str, Any]]) -> int:
        params = [SamplingParams(temperature=0.0, max_tokens=request["out"], ignore_eos=True) for request in requests]
        results = llm.generate([request["prompt"] for request in requests], params)
        return sum(len(result.outputs[0].token_ids) for result in results)

    requests = common.workload(arguments["requests"])
    generate(common.short(requests))
    prepare(llm)
    run = common.timed(lambda: generate(requests))
    assert run["tokens"] == sum(request["out"] for request in requests)
    return run


SIDES = {"generate() static 8": run_static, "inflight": run_inflight}


if __name__ == "__main__":
    common.compare(__file__, __doc__, SIDES)
