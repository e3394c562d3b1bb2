#!/usr/bin/env python3
"""Inflight and Hugging Face `generate()` in padded static batches: same checkpoint, work and threads.

    python bench/static.py [--requests 128] [--rounds 3] [--dtype bfloat16] [--output FILE]

The static side takes the requests in order, eight at a time, left-padded, and decodes until the batch's longest
output is complete; only tokens that a request asked for count.  The Inflight side is the engine in-process, with
up to 32 sequences in a step.  Greedy, end of sequence ignored, all requests offered at once.
"""

from __future__ import annotations

import time
from typing import Any

import common

BATCH = 8


def run_static(arguments: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments["threads"])
    path = common.checkpoint(arguments["dtype"])
    dtype = getattr(torch, arguments["dtype"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
    requests = common.workload(arguments["requests"])

    def batch(part: list[dict[str, Any]]) -> None:
        width = max(len(request["prompt"]) for request in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(part):
            ids[row, width - len(request["prompt"]) :] = torch.tensor(request["prompt"])
            mask[row, width - len(request["prompt"]) :] = 1
        count = max(request["out"] for request in part)
        model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None)

    with torch.inference_mode():
        batch([{"prompt": request["prompt"][:16], "out": 4} for request in requests[:BATCH]])
        start = time.perf_counter()
        for first in range(0, len(requests), BATCH):
            batch(requests[first : first + BATCH])
        seconds = time.perf_counter() - start
    tokens = sum(request["out"] for request in requests)
    return {"tokens_per_second": tokens / seconds, "tokens": tokens, "seconds": seconds}


def run_inflight(arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
    """One run of the engine in-process; `options` are keys of `EngineConfig`."""
    from inflight import LLM, SamplingParams

    llm = LLM(
        common.checkpoint(arguments["dtype"]),
        dtype=arguments["dtype"],
        max_num_seqs=32,
        cpu_threads=arguments["threads"],
        kv_cache_memory="2GiB",
        enable_prefix_caching=False,
        **options,
    )
    requests = common.workload(arguments["requests"])
    llm.generate([request["prompt"][:16] for request in requests[:8]], SamplingParams(temperature=0.0, max_tokens=4))
    params = [SamplingParams(temperature=0.0, max_tokens=request["out"], ignore_eos=True) for request in requests]
    start = time.perf_counter()
    results = llm.generate([request["prompt"] for request in requests], params)
    seconds = time.perf_counter() - start
    tokens = sum(len(result.outputs[0].token_ids) for result in results)
    assert tokens == sum(request["out"] for request in requests)
    return {"tokens_per_second": tokens / seconds, "tokens": tokens, "seconds": seconds}


SIDES = {"generate() static 8": run_static, "inflight": run_inflight}


if __name__ == "__main__":
    common.compare(__file__, __doc__.splitlines()[0], SIDES)
