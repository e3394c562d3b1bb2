"""The whole engine on a GPU; skipped without one.  Requires the backend's dependencies."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from card_sizes import sized
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from offline import make_core, run, tokens

from inflight.engine.sampling_params import SamplingParams

# prompt, output tokens
SHAPES = sized([(1, 30), (3, 24), (7, 40), (40, 16), (75, 30), (33, 33), (130, 12)], [(1, 4), (7, 8), (55, 3)])
LIMITS: dict[str, Any] = sized({}, dict(max_num_seqs=4, max_num_batched_tokens=50))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length, _ in SHAPES]


def generated(path: str, prompts: list[list[int]], params: list[SamplingParams], **options: Any) -> list[list[int]]:
    deltas = run(make_core(path, **{**LIMITS, **options}), prompts, params, stagger=2)
    return [tokens(deltas[number, 0]) for number in range(len(prompts))]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "granite", "phi3"])
def test_greedy_output_equals_generate(model_type: str, prompts: list[list[int]], tmp_path: Path) -> None:
    """float32 on the GPU compared with float32 on the CPU; chunks are small enough to mix with decodes."""
    changes = dict(head_dim=64) if model_type in ("llama", "qwen3") else {}
    path = make_checkpoint(model_type, tmp_path, **changes)
    counts = [count for _, count in SHAPES]
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    options: dict[str, Any] = sized({}, dict(enforce_eager=model_type != "llama"))  # test_gpu_graphs.py has graphs
    got = generated(path, prompts, params, device="cuda", block_size=16, max_num_batched_tokens=50, **options)
    assert got == greedy_reference(path, prompts, counts)


def test_seeded_output_equals_that_of_the_cpu(prompts: list[list[int]], tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, head_dim=64)
    kinds: list[dict[str, Any]] = [
        dict(),
        dict(top_p=0.8),
        dict(top_k=5, min_p=0.1),
        dict(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1),
    ]
    params = [
        SamplingParams(max_tokens=sized(20, 6), ignore_eos=True, seed=number, **kinds[number % len(kinds)])
        for number in range(len(prompts))
    ]
    options: dict[str, Any] = sized({}, dict(enforce_eager=True, check_on_load=False))
    on_gpu = generated(path, prompts, params, device="cuda", block_size=16, **options)
    assert on_gpu == generated(path, prompts, params, device="cpu", block_size=16)
