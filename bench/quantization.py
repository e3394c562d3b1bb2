#!/usr/bin/env python3
"""The effect of int8 weights and KV cache on quality: perplexity of the demo model on held-out text.

    python bench/quantization.py [--documents N] [--output FILE]

Each setting runs the held-out documents of the demo checkpoint (see model_repository/demo) through the engine, in
windows of 1024 tokens, and reads the log probabilities of the prompt tokens. Errors are relative to float32.
"""

from __future__ import annotations

import argparse
import math
import runpy
from pathlib import Path
from typing import Any

import common

DEMO = common.HERE.parent / "model_repository" / "demo"
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
    "bfloat16, int8 KV": dict(dtype="bfloat16", kv_cache_dtype="int8"),
    "float32, int8 weights": dict(dtype="float32", quantization="int8"),
    "bfloat16, int8 weights": dict(dtype="bfloat16", quantization="int8"),
}
WINDOW = 1024


def windows(documents: int | None) -> list[list[int]]:
    """Token ids of the held-out documents, concatenated and split into windows that overlap by one token."""
    from tokenizers import Tokenizer

    recipe = runpy.run_path(str(DEMO / "make_checkpoint.py"))
    _, held_out = recipe["split"](recipe["stdlib_documents"]())
    tokenizer = Tokenizer.from_file(str(DEMO / "1" / "checkpoint" / "tokenizer.json"))
    ids = [token for document in held_out[:documents] for token in tokenizer.encode(document.text).ids]
    return [ids[start : start + WINDOW + 1] for start in range(0, len(ids) - 1, WINDOW)]


def log_probabilities(options: dict[str, Any], prompts: list[list[int]]) -> list[float]:
    """Of all tokens of all prompts, except each prompt's first."""
    from inflight import LLM, SamplingParams

    llm = LLM(str(DEMO / "1" / "checkpoint"), kv_cache_memory="256MiB", **options)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    results = llm.generate(prompts, params)
    return [entry[0][1] for result in results for entry in result.prompt_logprobs[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, help="number of held-out documents; default: all")
    parser.add_argument("--output", type=Path, help="write the record to this file, as JSON")
    args = parser.parse_args()
    prompts = windows(args.documents)
    count = sum(len(prompt) - 1 for prompt in prompts)
    runs, exact = {}, None
    for name, options in SETTINGS.items():
        values = log_probabilities(options, prompts)
        exact = exact or values
        perplexity = math.exp(-sum(values) / count)
        changed = math.sqrt(sum((a - b) ** 2 for a, b in zip(values, exact)) / count)
        runs[name] = {"perplexity": perplexity, "log_probability_rms_change": changed}
        print(
            f"{name:<24} perplexity {perplexity:8.4f}   log probabilities off by {changed:.4f} nats (rms)", flush=True
        )
    common.record(args.output, runs, {"tokens": count, "window": WINDOW})


if __name__ == "__main__":
    main()
