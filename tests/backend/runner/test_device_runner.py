"""Launch-ahead without a thread: the runner of a GPU, over CPU tensors, gives the same output as `ModelRunner`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, VOCAB, make_checkpoint
from nightly import ARCHITECTURES_IN_SHORT, nightly_but
from offline import make_core, make_device_core, run, tokens

from inflight.engine.sampling_params import SamplingParams

from .test_drafts import Replayer
from .test_generation import mixed_params, random_prompts
from .test_parity import prepared


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("device"))


@pytest.mark.parametrize("model_type", nightly_but(ARCHITECTURES_IN_SHORT, ARCHITECTURES))
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


def any_params(index: int) -> SamplingParams:
    """Every rule alone and with others."""
    if index % 9 < 8:
        return mixed_params(index)
    allowed = list(range(index % 7, VOCAB, 5))
    return SamplingParams(seed=index, max_tokens=20, allowed_token_ids=allowed, frequency_penalty=0.5, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> dict[tuple[int, int], list[int]]:
    deltas = run(make_core(checkpoint), random_prompts(48), [any_params(index) for index in range(48)])
    return {key: tokens(of_sequence) for key, of_sequence in deltas.items()}


# Drafts with an error at each third place for every option; without drafts, and with right ones, for some.
IN_SHORT = [*((options, 3) for options in OPTIONS), ("roomy", 0), ("chunks", 0), ("swapped", 0), ("roomy", 10**9)]


@pytest.mark.parametrize(
    "case", nightly_but(IN_SHORT, [(options, wrong) for options in OPTIONS for wrong in (0, 3, 10**9)]), ids=str
)
def test_every_rule_gives_the_tokens_of_the_model_runner(checkpoint, expected, case: tuple[str, int]) -> None:
    options, wrong = case
    core = make_device_core(checkpoint, **OPTIONS[options])
    if wrong:
        core.scheduler.policies.drafter = Replayer(expected, wrong)
    params = [any_params(index) for index in range(48)]
    deltas = run(core, random_prompts(48), params, stagger=int(options == "chunks"))
    assert {key: tokens(of_sequence) for key, of_sequence in deltas.items()} == expected
    if "num_gpu_blocks_override" in OPTIONS[options]:
        assert core.scheduler.num_preempted_total > 10
    assert (core.scheduler.swap.num_swapped_in > 0) == (options == "swapped")


def test_a_token_in_flight_does_not_end_up_in_the_slot_s_next_request(checkpoint) -> None:
    """The first request ends with a stop token while another step of it runs; the next one reads its own prompt."""
    prompt = random_prompts(1, seed=2, low=60, high=61)[0]
    (first,) = run(make_core(checkpoint), [prompt[:5]], [SamplingParams(temperature=0.0, max_tokens=8)]).values()
    stop = tokens(first)[4]
    params = [
        SamplingParams(temperature=0.0, stop_token_ids=[stop], max_tokens=20),
        SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0),
    ]
    core = make_device_core(checkpoint, max_num_seqs=1, max_num_batched_tokens=5)
    deltas = run(core, [prompt[:5], prompt], params)
    entries = [entry for delta in deltas[1, 0] for entry in delta.prompt_logprobs or ()]
    assert [entry[0][0] for entry in entries[1:]] == prompt[1:]


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("drafts", [False, True])
def test_log_probabilities_are_those_of_the_model_runner(checkpoint, top: int, drafts: bool) -> None:
    """Of prompts in chunks and of outputs, while the next step runs."""
    prompts = random_prompts(5, seed=21)
    params = [
        SamplingParams(
            temperature=0.9, seed=i, max_tokens=12, logprobs=top, prompt_logprobs=top, ignore_eos=True, n=1 + i % 2
        )
        for i in range(5)
    ]

    def entries(core: Any) -> dict[tuple[int, int], list[Any]]:
        return {
            key: [e for delta in deltas for name in ("prompt_logprobs", "logprobs") for e in getattr(delta, name) or ()]
            for key, deltas in run(core, prompts, params).items()
        }

    options = dict(max_num_batched_tokens=17, max_num_seqs=4, block_size=4, enable_prefix_caching=False)
    plain = {key: tokens(deltas) for key, deltas in run(make_core(checkpoint), prompts, params).items()}
    expected = entries(make_core(checkpoint, **options))
    core = make_device_core(checkpoint, **options)
    if drafts:
        core.scheduler.policies.drafter = Replayer(plain, wrong=3)
    got = entries(core)
    assert got.keys() == expected.keys()
    for key, of_sequence in got.items():
        assert [[(t, r) for t, _, r in e] for e in of_sequence] == [[(t, r) for t, _, r in e] for e in expected[key]]
        for one, other in zip(of_sequence, expected[key]):
            assert [p for _, p, _ in one] == pytest.approx([p for _, p, _ in other], abs=1e-5)
