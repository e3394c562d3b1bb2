"""The whole engine on the GPU attention kernel, in the Triton language's interpreter: same tokens as transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from offline import make_core, run, tokens

pytest.importorskip("triton")

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu.launch import interpreted

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # the interpreter's
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # in masked scores
]

SHAPES = [(1, 8), (37, 4), (20, 6)]  # prompt, output tokens


@pytest.mark.nightly  # test_gpu_graph_steps.py runs an engine, too
def test_greedy_output_equals_generate(tmp_path: Path) -> None:
    """Windows and sinks; chunks, mixes and decodes."""
    torch.set_num_threads(1)
    path = make_checkpoint("gpt_oss", tmp_path)
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length, _ in SHAPES]
    counts = [count for _, count in SHAPES]
    core = make_core(path, attention_backend="gpu", max_num_batched_tokens=24, max_num_seqs=4)
    assert core.runner.info.attention_backend == "gpu"
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    deltas = run(core, prompts, params, stagger=2)
    expected = greedy_reference(path, prompts, counts)
    assert [tokens(deltas[i, 0]) for i in range(len(prompts))] == expected
    assert len({token for output in expected for token in output}) >= 8
