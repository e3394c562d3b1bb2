"""Steps of the GPU's kernels on an emulated card, captured and padded: the tokens of steps without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from emulated_card import Card
from nightly import nightly_but
from offline import make_core, run, tokens

pytest.importorskip("triton")

from card_rig import card_core, num_replays

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu import gpu_attention, gpu_attention_configs, gpu_sampler
from inflight.kernels.gpu.launch import interpreted
from inflight.runner.graphs import DecodeGraphs

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, on infinities in the interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

PROMPTS = [[5, 9, 30, 2, 77], [8], [100, 3, 55, 4]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
    SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, max_tokens=4, ignore_eos=True, seed=3, bad_words_ids=[[9], [3, 8]]
    ),
    SamplingParams(
        temperature=1.0,
        min_p=0.05,
        frequency_penalty=0.4,
        presence_penalty=0.5,
        max_tokens=3,
        ignore_eos=True,
        seed=4,
        logit_bias={7: 2.0, 9: -50.0},
        allowed_token_ids=[*range(0, VOCAB, 3), 7],
    ),
]
LIMITS = dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=16, block_size=4, check_on_load=False)


def outputs(core: Any) -> dict[tuple[int, int], list[int]]:
    return {key: tokens(deltas) for key, deltas in run(core, PROMPTS, PARAMS).items()}


@pytest.fixture(params=nightly_but(["llama"], ["llama", "gpt_oss"]))
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[tuple[int, int], list[int]]]:
    """A checkpoint, and what the kernels of a CPU make of it."""
    torch.set_num_threads(1)
    path = make_checkpoint(request.param, tmp_path)
    expected = outputs(make_core(path, **LIMITS))
    assert expected[0, 0] == greedy_reference(path, PROMPTS[:1], [5])[0]
    return path, expected


@pytest.fixture
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sampler, "BLOCK", 256)
    monkeypatch.setattr(DecodeGraphs, "measure", lambda self, meter: 0)
    for module in (gpu_attention, gpu_attention_configs):
        monkeypatch.setattr(module, "SCRATCH_BYTES", 2**18)  # the interpreter copies it at each launch


def test_every_bucket_gives_the_tokens_of_unpadded_steps(checkpoint: Any, card: Card, small_kernels: None) -> None:
    """A bucket of four for three decodes, then those of two and one.

    One of 16 tokens and 4 rows serves chunks, decodes beside them, and rows that enter while others run.
    """
    path, expected = checkpoint
    options = {**LIMITS, "max_num_batched_tokens": 7, "max_cudagraph_capture_size": 16}
    core = card_core(path, num_gpu_blocks_override=128, **options)
    assert outputs(core) == expected
    assert {key: tokens(deltas) for key, deltas in run(core, PROMPTS, PARAMS, stagger=1).items()} == expected
    replays = num_replays(core)
    decodes = {bucket.rows: count for bucket, count in replays.items() if not bucket.prompt_blocks}
    assert sorted(decodes) == [1, 2, 4]
    assert all(decodes.values()), decodes
    (with_prompts,) = [count for bucket, count in replays.items() if bucket.prompt_blocks]
    assert with_prompts >= 3
