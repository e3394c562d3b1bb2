#!/usr/bin/env python3
"""The effect of weights and KV cache in eight bits on quality: the demo model on held-out text.

    python bench/quantization.py [--documents N] [--output FILE]

Each setting computes the held-out documents of the demo checkpoint (see model_repository/demo) in windows of 1024
tokens.  Its distributions of the next token are compared with those in float32: perplexity, mean Kullback-Leibler
divergence, and how often the most likely token is the same.  Numbers in fp8 are those of a GPU, computed on the CPU (by
the twins of the tests).
"""

from __future__ import annotations

import math
import runpy
import sys
from typing import Any

import common
import torch
from attention_batch import metadata_of
from torch import Tensor

sys.path.append(str(common.ROOT / "tests" / "support"))  # the twins

from fp8_twins import fp8_twins

from inflight.attention.base import forward_context
from inflight.config import EngineConfig
from inflight.loading.loader import LoadedModel, load

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
    "bfloat16, int8 KV": dict(dtype="bfloat16", kv_cache_dtype="int8"),
    "float32, int8 weights": dict(dtype="float32", quantization="int8"),
    "bfloat16, int8 weights": dict(dtype="bfloat16", quantization="int8"),
    "bfloat16, fp8 KV": dict(dtype="bfloat16", kv_cache_dtype="fp8"),
    "bfloat16, fp8 weights": dict(dtype="bfloat16", quantization="fp8"),
    "bfloat16, fp8 weights and KV": dict(dtype="bfloat16", quantization="fp8", kv_cache_dtype="fp8"),
}
WINDOW = 1024


def windows(documents: int | None) -> list[list[int]]:
    """Token ids of the held-out documents, concatenated and split into windows that overlap by one token."""
    from tokenizers import Tokenizer

    recipe = runpy.run_path(str(common.DEMO.parents[1] / "make_checkpoint.py"))
    _, held_out = recipe["split"](recipe["stdlib_documents"]())
    tokenizer = Tokenizer.from_file(str(common.DEMO / "tokenizer.json"))
    ids = [token for document in held_out[:documents] for token in tokenizer.encode(document.text).ids]
    return [ids[start : start + WINDOW + 1] for start in range(0, len(ids) - 1, WINDOW)]


def loaded(options: dict[str, Any]) -> LoadedModel:
    values = {"model": str(common.DEMO), "device": "cpu", "kv_cache_memory": "64MiB", **options}
    with fp8_twins():
        return load(EngineConfig.from_dict(values))


@torch.inference_mode()
def log_probabilities(model: LoadedModel, ids: list[int]) -> Tensor:
    """float32 [n - 1, V]: of each possible token after each of the n ids but the last, computed in one step."""
    n, block_size = len(ids) - 1, model.config.block_size
    table = torch.arange(-(-n // block_size), dtype=torch.int32)[None]
    metadata = metadata_of([n], [n], table, block_size)
    with forward_context(metadata, model.backend):
        inputs, positions = torch.tensor([ids[:-1]]), torch.arange(n)[None]
        logits = model.model(input_ids=inputs, position_ids=positions, use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def compare(prompts: list[list[int]], exact: list[Tensor], found: list[Tensor]) -> dict[str, float]:
    """Compares the distributions `found` for `prompts` with the `exact` ones; divergences are in nats per token."""
    count = sum(map(len, exact))
    loss = changed = divergence = same = 0.0
    for ids, right, other in zip(prompts, exact, found):
        actual = torch.tensor(ids[1:])[:, None]
        loss -= other.gather(1, actual).sum().item()
        changed += (other.gather(1, actual) - right.gather(1, actual)).square().sum().item()
        divergence += (right.exp() * (right - other)).sum().item()
        same += (right.argmax(-1) == other.argmax(-1)).sum().item()
    return {
        "perplexity": math.exp(loss / count),
        "log_probability_rms_change": math.sqrt(changed / count),
        "kl_divergence": divergence / count,
        "same_most_likely_token": same / count,
    }


def main() -> None:
    args = common.options(__doc__, documents=dict(type=int, help="number of held-out documents; default: all"))
    prompts = windows(args.documents)
    runs: dict[str, dict[str, float]] = {}
    exact: list[Tensor] = []
    for name, options in SETTINGS.items():
        model = loaded(options)
        found = [log_probabilities(model, ids) for ids in prompts]
        exact = exact or found
        run = runs[name] = compare(prompts, exact, found)
        print(
            f"{name:<28} perplexity {run['perplexity']:8.4f}   KL divergence {run['kl_divergence']:.6f} nats   "
            f"same most likely token {run['same_most_likely_token']:.2%}",
            flush=True,
        )
    common.record(args, runs, tokens=sum(map(len, exact)), window=WINDOW)


if __name__ == "__main__":
    main()
