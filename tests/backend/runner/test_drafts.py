"""Drafts through the whole engine: any draft gives the same tokens and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from offline import make_core, run, tokens

from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams

from .test_generation import mixed_params, random_prompts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("drafts"))


class Replayer:
    """Drafts the known output of each request, with every `wrong`-th position off by one token id."""

    def __init__(self, outputs: dict[tuple[int, int], list[int]], wrong: int, length: int = 5) -> None:
        self.outputs, self.wrong, self.length = outputs, wrong, length
        self.num_drafts = self.num_accepted = 0

    active = True

    def propose(self, request: Request, num_unknown: int, limit: int) -> Sequence[int]:
        output = self.outputs[request.request_id, request.index]
        first = request.num_output_tokens + num_unknown
        drafts = output[first : first + min(limit, self.length)]
        return [(t + 1) % VOCAB if (first + i) % self.wrong == 0 else t for i, t in enumerate(drafts)]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted


OPTIONS = {
    "one step at a time": dict(),
    "launched ahead": dict(async_scheduling=True),
    "squeezed": dict(block_size=4, num_gpu_blocks_override=80, max_num_batched_tokens=50),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("wrong", [1, 3, 10**9])
def test_seeded_output_does_not_depend_on_the_drafts(checkpoint, options, wrong):
    prompts = random_prompts(24)
    params = [mixed_params(index) for index in range(24)]
    plain = {key: tokens(deltas) for key, deltas in run(make_core(checkpoint), prompts, params).items()}
    core = make_core(checkpoint, **OPTIONS[options])
    drafter = core.scheduler.policies.drafter = Replayer(plain, wrong)
    drafted = run(core, prompts, params)
    assert {key: tokens(deltas) for key, deltas in drafted.items()} == plain
    if options == "squeezed":
        assert core.scheduler.num_preempted_total > 0
    if wrong > 1:
        assert drafter.num_accepted > 100
    assert drafter.num_drafts - drafter.num_accepted > 0 or wrong > 3


def test_greedy_output_with_drafts_equals_generate(checkpoint):
    prompts = random_prompts(6, seed=3, low=5, high=50)
    reference = greedy_reference(checkpoint, prompts, [20] * 6)
    core = make_core(checkpoint)
    core.scheduler.policies.drafter = Replayer({(i, 0): output for i, output in enumerate(reference)}, wrong=4)
    params = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)] * 6
    deltas = run(core, prompts, params)
    assert [tokens(deltas[i, 0]) for i in range(6)] == reference


def test_logprobs_do_not_depend_on_the_drafts(checkpoint):
    prompts = random_prompts(4, seed=21)
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=12, logprobs=2, prompt_logprobs=1, ignore_eos=True)
        for i in range(4)
    ]

    def entries(deltas, name):
        return [entry for delta in deltas for entry in getattr(delta, name) or []]

    plain = run(make_core(checkpoint), prompts, params)
    core = make_core(checkpoint)
    core.scheduler.policies.drafter = Replayer({key: tokens(deltas) for key, deltas in plain.items()}, wrong=3)
    drafted = run(core, prompts, params)
    for key in plain:
        for name in ("logprobs", "prompt_logprobs"):
            got, expected = entries(drafted[key], name), entries(plain[key], name)
            assert [[(t, r) for t, _, r in entry] for entry in got] == [[(t, r) for t, _, r in e] for e in expected]
            for one, other in zip(got, expected):
                assert [p for _, p, _ in one] == pytest.approx([p for _, p, _ in other], abs=1e-5)
        assert len(entries(drafted[key], "logprobs")) == 12
