"""Greedy float32 output equals that of transformers' `generate()`, token for token (invariant 5)."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, VOCAB, greedy_reference, make_checkpoint
from nightly import ARCHITECTURES_IN_SHORT
from offline import make_core, run, tokens

from inflight.engine.sampling_params import SamplingParams

SHAPES = [(1, 30), (3, 24), (7, 40), (40, 16), (75, 30), (2, 8), (33, 33), (130, 12)]  # prompt, output tokens

# Settings under which every architecture is tested; they differ in how requests are split into steps.
SETTINGS = {
    "one big step": dict(block_size=16, max_num_batched_tokens=2048, max_num_seqs=64),
    "one token per step": dict(block_size=1, max_num_batched_tokens=1, max_num_seqs=4),
    "small chunks": dict(block_size=5, max_num_batched_tokens=13, max_num_seqs=3, async_scheduling=True),
    "preempting": dict(block_size=4, max_num_batched_tokens=64, max_num_seqs=64, num_gpu_blocks_override=64),
    "one at a time": dict(block_size=64, max_num_batched_tokens=32, max_num_seqs=1),
}


PREEMPTED_IN_SHORT = {(model_type, "preempting") for model_type in ARCHITECTURES_IN_SHORT}


@functools.cache
def prepared(model_type: str) -> tuple[str, list[list[int]], list[int], list[list[int]]]:
    torch.set_num_threads(1)
    path = make_checkpoint(model_type, Path(tempfile.mkdtemp(prefix="inflight-test-")))
    rng = random.Random(model_type)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length, _ in SHAPES]
    counts = [count for _, count in SHAPES]
    return path, prompts, counts, greedy_reference(path, prompts, counts)


@pytest.mark.parametrize(
    ("model_type", "setting"),
    [
        (model_type, setting)
        if setting == "small chunks" or model_type == "llama" or (model_type, setting) in PREEMPTED_IN_SHORT
        else pytest.param(model_type, setting, marks=pytest.mark.nightly)
        for model_type in ARCHITECTURES
        for setting in SETTINGS
    ],
)
def test_greedy_output_equals_generate(model_type, setting):
    path, prompts, counts, reference = prepared(model_type)
    distinct = {token for output in reference for token in output}
    assert len(distinct) >= 10, "a model that repeats one token would pass even with broken attention"
    core = make_core(path, **SETTINGS[setting])
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    deltas = run(core, prompts, params, stagger=2)
    assert [tokens(deltas[i, 0]) for i in range(len(prompts))] == reference
    if setting == "preempting":
        assert core.scheduler.num_preempted_total > 0, "the pool must be too small"


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [*ARCHITECTURES, "roberta"])
def test_the_reference_is_that_of_each_prompt_alone(model_type: str) -> None:
    path, prompts, counts, reference = prepared(model_type)
    assert reference == greedy_reference(path, prompts, counts, alone=True)


def test_positions_are_those_of_generate_where_forward_counts_otherwise() -> None:
    """roberta's `forward()` counts from `padding_idx + 1` unless it gets positions, as `generate()` gives them."""
    test_greedy_output_equals_generate("roberta", "small chunks")
