#!/usr/bin/env python3
"""What a KV cache in int8 costs in quality: the demo checkpoint on text that it has not been trained on.

    python bench/kv_cache_quality.py [--windows 40] [--output record.json]

The held-out part of the demo's text (model_repository/demo/make_checkpoint.py), in windows of 1024 tokens,
goes through the paged model in chunks of 256 tokens, so that most keys are read back from the pool.  Each
kind of cache is compared with float32 on the same weights: perplexity, relative error of the logits, share
of positions whose most likely token is the same, and KL divergence.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import machine
from torch import Tensor
from transformers import AutoTokenizer

from inflight.attention.base import AttentionMetadata, forward_context
from inflight.config import EngineConfig
from inflight.runner.loader import LoadedModel, load

DEMO = Path(__file__).parents[1] / "model_repository" / "demo"
CHECKPOINT = DEMO / "1" / "checkpoint"
WINDOW, CHUNK, BLOCK_SIZE = 1024, 256, 16
# dtype of the model, kv_cache_dtype; the first is what the others are compared with.
KINDS = [("float32", "auto"), ("float32", "int8"), ("bfloat16", "auto"), ("bfloat16", "int8")]


def held_out_tokens() -> list[int]:
    """The documents that the demo's recipe keeps from training, one after the other."""
    spec = importlib.util.spec_from_file_location("make_checkpoint", DEMO / "make_checkpoint.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up while the class is made
    spec.loader.exec_module(script)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
    _, documents = script.split(script.stdlib_documents())
    return [token for document in documents for token in tokenizer.encode(document.text, verbose=False)]


def load_kind(dtype: str, kv: str) -> LoadedModel:
    options = {"model": str(CHECKPOINT), "dtype": dtype, "device": "cpu", "kv_cache_dtype": kv}
    return load(EngineConfig.from_dict({**options, "block_size": BLOCK_SIZE, "kv_cache_memory": "64MiB"}))


def metadata_of(begin: int, end: int) -> AttentionMetadata:
    """One request in the pool's first blocks, of whose tokens begin .. end are new."""
    blocks = -(-end // BLOCK_SIZE)
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(begin, end),
        query_starts=[0, end - begin],
        lens=[end],
        max_query_len=end - begin,
        max_seq_len=end,
        block_size=BLOCK_SIZE,
    )


@torch.inference_mode()
def logits_of(loaded: LoadedModel, token_ids: list[int]) -> Tensor:
    """float32 [tokens, V]."""
    parts = []
    for begin in range(0, len(token_ids), CHUNK):
        end = min(begin + CHUNK, len(token_ids))
        with forward_context(metadata_of(begin, end)):
            inputs = torch.tensor([token_ids[begin:end]])
            parts.append(
                loaded.model(input_ids=inputs, position_ids=torch.arange(begin, end)[None], use_cache=False).logits[0]
            )
    return torch.cat(parts).float()


def measure(windows: list[list[int]]) -> list[dict[str, Any]]:
    models = [load_kind(*kind) for kind in KINDS]
    sums = [dict.fromkeys(("nll", "error", "norm", "same", "kl"), 0.0) for _ in KINDS]
    tokens = 0
    for window in windows:
        targets = torch.tensor(window[1:])
        tokens += len(targets)
        expected = None
        for loaded, total in zip(models, sums):
            logits = logits_of(loaded, window[:-1])
            expected = logits if expected is None else expected
            own, other = expected.log_softmax(-1), logits.log_softmax(-1)
            total["nll"] += F.nll_loss(other, targets, reduction="sum").item()
            total["error"] += (logits - expected).square().sum().item()
            total["norm"] += expected.square().sum().item()
            total["same"] += (logits.argmax(-1) == expected.argmax(-1)).sum().item()
            total["kl"] += (own.exp() * (own - other)).sum().item()
    return [
        {
            "dtype": dtype,
            "kv_cache_dtype": kv,
            "perplexity": math.exp(total["nll"] / tokens),
            "relative_logit_error": math.sqrt(total["error"] / total["norm"]),
            "same_top_token": total["same"] / tokens,
            "kl_nats": total["kl"] / tokens,
        }
        for (dtype, kv), total in zip(KINDS, sums)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=40, help=f"of {WINDOW} tokens; fewer where the text ends")
    parser.add_argument("--output", type=Path, help="write the record there as JSON")
    options = parser.parse_args()
    ids = held_out_tokens()
    starts = range(0, len(ids) - 1, WINDOW)[: options.windows]
    rows = measure([ids[begin : begin + WINDOW + 1] for begin in starts])
    for row in rows:
        print(
            f"{row['dtype']:<9}{row['kv_cache_dtype']:<5} perplexity {row['perplexity']:.4f}  logit error "
            f"{row['relative_logit_error']:.3%}  same top token {row['same_top_token']:.2%}  KL {row['kl_nats']:.2e}"
        )
    if options.output:
        record = {
            "machine": machine(),
            "torch": torch.__version__,
            "windows": len(starts),
            "window": WINDOW,
            "rows": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
