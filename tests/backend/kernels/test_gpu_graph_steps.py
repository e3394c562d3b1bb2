"""Decode steps of the GPU's kernels, in the interpreter, captured and padded: the tokens of steps without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import greedy_reference, make_checkpoint
from fake_graph import FakeCapturer, interpreted_launches
from nightly import nightly_but
from offline import make_core, run, tokens

pytest.importorskip("triton")

from graph_rig import ChosenBy, captured_by, fused_by, graph_core, pretend_a_card

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu import gpu_attention, gpu_attention_configs, gpu_sampler
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_ops import GpuOps
from inflight.kernels.gpu.launch import interpreted
from inflight.loading import loader
from inflight.runner import base_runner as base
from inflight.runner import step_inputs
from inflight.runner.graphs import DecodeGraphs

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, on infinities in the interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

PROMPTS = [[5, 9, 30, 2, 77], [8], [100, 3, 55, 4]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=4, ignore_eos=True, seed=3),
    SamplingParams(temperature=1.0, frequency_penalty=0.4, max_tokens=3, ignore_eos=True, seed=4),
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
def card(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_card(monkeypatch)
    small = gpu_attention_configs.Card((9, 0), 2, 227 * 1024)  # few programs share a request's keys
    monkeypatch.setattr(loader, "select_attention", lambda *args: GpuAttention(small))
    monkeypatch.setattr(loader, "accelerate", fused_by(GpuOps()))
    monkeypatch.setattr(step_inputs, "can_launch", lambda device: True)
    monkeypatch.setattr(base, "select_sampling", lambda device: ChosenBy(gpu_sampler.choose))
    monkeypatch.setattr(gpu_sampler, "BLOCK", 256)
    monkeypatch.setattr(DecodeGraphs, "measure", lambda self, meter: 0)
    for module in (gpu_attention, gpu_attention_configs):
        monkeypatch.setattr(module, "SCRATCH_BYTES", 2**18)  # the interpreter copies it at each launch
    monkeypatch.setattr(FakeCapturer, "warm_up", lambda self, launch: None)  # nothing is compiled
    interpreted_launches(monkeypatch)


def test_every_bucket_gives_the_tokens_of_unpadded_steps(checkpoint: Any, card: None) -> None:
    """A bucket of four for three rows, then those of two and one."""
    path, expected = checkpoint
    core = graph_core(path, async_scheduling=True, **LIMITS)
    assert outputs(core) == expected
    replays = {len(graph.outputs[0]): graph.replays for graph in captured_by(core).graphs}
    assert sorted(replays) == [1, 2, 4]
    assert all(replays.values()), replays


def test_steps_with_prompts_give_the_tokens_of_unpadded_steps(checkpoint: Any, card: None) -> None:
    """One bucket of 16 tokens and 4 rows serves chunks, decodes beside them, and rows that enter while others run."""
    path, expected = checkpoint
    core = graph_core(path, max_cudagraph_capture_size=16, **{**LIMITS, "max_num_batched_tokens": 7})
    found = {key: tokens(deltas) for key, deltas in run(core, PROMPTS, PARAMS, stagger=1).items()}
    assert found == expected
    (replays,) = [graph.replays for key, graph in core.runner.graphs._graphs.items() if key[0].prompt_blocks]
    assert replays >= 3
