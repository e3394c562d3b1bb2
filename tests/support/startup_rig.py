"""Starts from kept weights, and what they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_files
import integer_checkpoints
import numpy as np
import pytest
from checkpoints import VOCAB, make_checkpoint

from inflight.config import EngineConfig
from inflight.loading.check.cases import Case
from inflight.loading.check.paged_logits import paged_logits
from inflight.loading.loaded_model import LoadedModel
from inflight.loading.startup import REUSED, load_or_reuse, wait_until_kept

__all__ = ["CHAIN", "OF_BLOCKS", "config", "in_codes", "is_reused", "logits", "start"]

Log = pytest.LogCaptureFixture


def config(path: str, **options: Any) -> EngineConfig:
    return EngineConfig.from_dict({"model": path, "device": "cpu", "kv_cache_memory": "1MiB", **options})


def start(path: str, **options: Any) -> LoadedModel:
    loaded = load_or_reuse(config(path, **options))
    wait_until_kept()
    return loaded


def is_reused(log: Log) -> bool:
    """Whether all starts since the last call were made from kept weights."""
    phases = [record.message for record in log.records if record.name == "inflight.load_phases"]
    log.clear()
    return REUSED in phases and "reading the weights" not in phases


def logits(loaded: LoadedModel) -> list[np.ndarray]:
    """Of sequences that no check at load has computed."""
    cases = [Case(np.random.default_rng(seed).integers(0, VOCAB, 9 + 7 * seed).tolist()) for seed in (5, 6)]
    found = paged_logits(loaded.model, loaded.backend, cases, loaded.config.block_size, loaded.device, ())
    return [each.numpy() for each in found]


OF_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 16, "tie_word_embeddings": True}


CHAIN = "gptq act-order"  # query, key and value have orders of their own


def in_codes(stored: str, folder: Path) -> str:
    """A small model in one of the formats of `integer_checkpoints`, or a GGUF file of one type of blocks."""
    if stored in integer_checkpoints.WRITERS:
        path = make_checkpoint("qwen2", folder)  # with biases
        integer_checkpoints.write(path, stored, except_for=("layers.0.mlp.down",))
        return path
    file = folder / "model.gguf"
    gguf_files.as_gguf(make_checkpoint("llama", folder / "plain", **OF_BLOCKS), file, stored)
    return str(file)
