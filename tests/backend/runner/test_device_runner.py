"""Launch-ahead without a thread: the runner of a GPU, over CPU tensors, gives the same output as `ModelRunner`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, make_checkpoint
from offline import make_core, make_device_core, run, tokens

from inflight.engine.sampling_params import SamplingParams

from .test_drafts import Replayer
from .test_generation import mixed_params, random_prompts
from .test_parity import prepared


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("device"))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_output_equals_generate(model_type: str) -> None:
    path, prompts, counts, reference = prepared(model_type)
    core = make_device_core(path, block_size=5, max_num_batched_tokens=40, max_num_seqs=4)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    deltas = run(core, prompts, params, stagger=2)
    assert [tokens(deltas[i, 0]) for i in range(len(prompts))] == reference


OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": dict(),
    "one step at a time": dict(async_scheduling=False),
    "chunks": dict(block_size=3, max_num_batched_tokens=11, max_num_seqs=5),
    "squeezed": dict(block_size=4, num_gpu_blocks_override=80, max_num_batched_tokens=50),
    "swapped": dict(
        block_size=4, num_gpu_blocks_override=80, max_num_batched_tokens=50, swap_space="1MiB", preemption_mode="swap"
    ),
}


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> dict[tuple[int, int], list[int]]:
    deltas = run(make_core(checkpoint), random_prompts(48), [mixed_params(index) for index in range(48)])
    return {key: tokens(of_sequence) for key, of_sequence in deltas.items()}


@pytest.mark.parametrize("wrong", [0, 3, 10**9])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_rule_gives_the_tokens_of_the_model_runner(checkpoint, expected, options, wrong) -> None:
    core = make_device_core(checkpoint, **OPTIONS[options])
    if wrong:
        core.scheduler.policies.drafter = Replayer(expected, wrong)
    params = [mixed_params(index) for index in range(48)]
    deltas = run(core, random_prompts(48), params, stagger=int(options == "chunks"))
    assert {key: tokens(of_sequence) for key, of_sequence in deltas.items()} == expected
    if "num_gpu_blocks_override" in OPTIONS[options]:
        assert core.scheduler.num_preempted_total > 10
    assert (core.swap.num_swapped_in > 0) == (options == "swapped")
