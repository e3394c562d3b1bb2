"""`kv_cache_dtype: "int8"` in whole models: pool size, outputs, quality, and rejected values."""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from offline import make_core, run, tokens
from transformers import AutoTokenizer

from inflight.attention.base import AttentionMetadata, forward_context
from inflight.config import ConfigError, EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.cpu import library
from inflight.loading.loader import LoadedModel, load

DEMO = Path(__file__).parents[3] / "model_repository" / "demo" / "1" / "checkpoint"
needs_kernel = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama", tmp_path_factory.mktemp("int8"))


def config(path: str, **options: object) -> EngineConfig:
    return EngineConfig.from_dict({"model": path, "device": "cpu", "kv_cache_memory": "4MiB", **options})


@needs_kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_memory_holds_more_tokens(llama: str, dtype: str) -> None:
    """And the check at load passes.  Head size 8: 8 bytes plus 2 for the scale, instead of 16 or 32."""
    plain, int8 = (
        load(config(llama, dtype=dtype, kv_cache_dtype=kv, kv_cache_memory="64KiB")).info for kv in ("auto", "int8")
    )
    assert int8.attention_backend == "cpu"
    assert int8.num_blocks / plain.num_blocks == pytest.approx({"float32": 3.2, "bfloat16": 1.6}[dtype], rel=0.05)
    assert int8.kv_bytes <= 64 * 1024


@needs_kernel
def test_tokens_equal_those_of_the_reference_kernel(llama: str) -> None:
    """The pool contains the same bytes, so greedy tokens are equal for any batch and chunks."""
    prompts = [[7, 3, 9, 100, 5] * 12, [1, 2, 3], [50] * 33, [7, 3, 9, 100, 5] * 8]
    params = [SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True) for _ in prompts]
    outputs = []
    for options in (
        dict(attention_backend="reference", max_num_seqs=1),
        dict(attention_backend="cpu", max_num_batched_tokens=24, max_num_seqs=3),
        dict(attention_backend="cpu", block_size=7, num_gpu_blocks_override=40),
    ):
        deltas = run(make_core(llama, kv_cache_dtype="int8", **options), prompts, params)
        outputs.append({key: tokens(value) for key, value in deltas.items()})
    assert outputs[0] == outputs[1] == outputs[2]


@torch.inference_mode()
def loss(loaded: LoadedModel, ids: list[int]) -> float:
    """Nats per token, all computed in one step."""
    n = len(ids) - 1
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        block_table=torch.arange(-(-n // 16), dtype=torch.int32)[None],
        slot_mapping=torch.arange(n),
        query_start_loc_cpu=[0, n],
        seq_lens_cpu=[n],
        max_query_len=n,
        max_seq_len=n,
        block_size=16,
    )
    with forward_context(metadata, loaded.backend):
        inputs, positions = torch.tensor([ids[:-1]]), torch.arange(n)[None]
        logits = loaded.model(input_ids=inputs, position_ids=positions, use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits.float(), torch.tensor(ids[1:])).item()


@needs_kernel
def test_the_loss_of_a_trained_model_hardly_changes() -> None:
    """Perplexity of the demo model changes by less than 0.5%; a larger model's: tests/real_model/test_quality.py."""
    text = "\n".join(inspect.getdoc(part) or "" for part in (json, argparse, argparse.ArgumentParser, json.JSONEncoder))
    ids = AutoTokenizer.from_pretrained(DEMO, local_files_only=True).encode(text)[:1000]
    plain, int8 = (loss(load(config(str(DEMO), dtype="float32", kv_cache_dtype=kv)), ids) for kv in ("auto", "int8"))
    assert plain != int8
    assert abs(plain - int8) < 0.005


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_an_unsupported_dtype_is_rejected_with_the_supported_ones(llama: str, backend: str) -> None:
    if backend == "cpu" and library.unavailable() is not None:
        pytest.skip("no compiled kernel")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8' \(supported: 'auto' and 'int8'\)"):
        load(config(llama, kv_cache_dtype="fp8", attention_backend=backend))


def test_an_unknown_dtype_is_rejected_with_the_choices(llama: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int4'.*'auto', 'int8', 'fp8'"):
        config(llama, kv_cache_dtype="int4")
