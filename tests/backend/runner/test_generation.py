"""Sampling, log probabilities and n > 1 through the whole engine, on a tiny random llama."""

from __future__ import annotations

import random

import pytest
import torch
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from offline import make_core, run, tokens
from transformers import AutoModelForCausalLM

from inflight.engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("generation"))


def random_prompts(count: int, seed: int = 7, low: int = 2, high: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(low, high))] for _ in range(count)]


def mixed_params(index: int) -> SamplingParams:
    kinds = [
        dict(temperature=1.0),
        dict(temperature=0.7, top_k=20),
        dict(temperature=1.3, top_p=0.8),
        dict(temperature=0.9, min_p=0.05, repetition_penalty=1.2),
        dict(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.4, top_k=50, top_p=0.9),
        dict(temperature=0.0, min_tokens=5, stop_token_ids=[3, 4, 5]),
        dict(temperature=0.8, logit_bias={7: 4.0, 9: -50.0}, bad_words_ids=[[11], [12, 13]]),
        dict(temperature=0.0),
    ]
    return SamplingParams(**kinds[index % len(kinds)], seed=1000 + index, max_tokens=20, ignore_eos=True)


def test_a_seeded_request_gives_the_same_tokens_alone_batched_and_after_preemption(checkpoint):
    prompts = random_prompts(40)
    params = [mixed_params(index) for index in range(40)]
    batch = run(make_core(checkpoint), prompts, params)
    squeezed_core = make_core(
        checkpoint, block_size=4, num_gpu_blocks_override=80, max_num_batched_tokens=50, async_scheduling=True
    )
    squeezed = run(squeezed_core, prompts, params)
    assert squeezed_core.scheduler.num_preempted_total > 10
    alone_core = make_core(checkpoint, enable_prefix_caching=False)
    for index, prompt in enumerate(prompts):
        alone = tokens(run(alone_core, [prompt], [params[index]])[0, 0])
        assert tokens(batch[index, 0]) == alone, f"request {index} in a batch of 40"
        assert tokens(squeezed[index, 0]) == alone, f"request {index} after preemption"


def test_prefix_hits_do_not_change_the_output(checkpoint):
    shared = random_prompts(1, seed=3, low=100, high=101)[0]
    prompts = [[*shared, *tail] for tail in random_prompts(12, seed=5, high=20)]
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * len(prompts)
    core = make_core(checkpoint)
    with_cache = run(core, prompts, params, stagger=1)
    assert core.pool.num_prefix_hits > 96 * 8
    assert [tokens(with_cache[i, 0]) for i in range(12)] == greedy_reference(checkpoint, prompts, [12] * 12)


@pytest.mark.parametrize("caching", [True, False])
def test_n_sequences_differ_and_each_is_reproducible(checkpoint, caching):
    prompt = random_prompts(1, seed=9, low=40, high=41)[0]
    params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=10, ignore_eos=True)
    first = run(make_core(checkpoint, enable_prefix_caching=caching), [prompt], [params])
    again = run(make_core(checkpoint, block_size=4, max_num_seqs=2), [prompt], [params])
    outputs = [tokens(first[0, index]) for index in range(4)]
    assert len({tuple(output) for output in outputs}) == 4
    assert outputs == [tokens(again[0, index]) for index in range(4)]
    single = run(make_core(checkpoint), [prompt], [SamplingParams(temperature=1.0, seed=5, max_tokens=10)])
    assert tokens(single[0, 0]) == outputs[0], "the first sequence equals the request without n"


def test_logprobs_equal_the_model_s(checkpoint):
    prompt = random_prompts(1, seed=11, low=30, high=31)[0]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    deltas = run(make_core(checkpoint, max_num_batched_tokens=7), [prompt], [params])[0, 0]
    output = tokens(deltas)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([[*prompt, *output]])).logits[0], dim=-1)

    sampled = [entry for delta in deltas for entry in delta.logprobs or []]
    assert len(sampled) == len(output)
    for step, entry in enumerate(sampled):
        _check_entry(entry, output[step], expected[len(prompt) + step - 1], top=3)
    of_prompt = [entry for delta in deltas for entry in delta.prompt_logprobs or []]
    assert len(of_prompt) == len(prompt)
    assert of_prompt[0] == []
    for position in range(1, len(prompt)):
        _check_entry(of_prompt[position], prompt[position], expected[position - 1], top=2)


def _check_entry(entry, token, row, top):
    assert entry[0][0] == token
    assert len(entry) == 1 + top
    for token_id, logprob, rank in entry:
        assert logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert rank == 1 + int((row > row[token_id]).sum())
    assert [rank for _, _, rank in entry[1:]] == list(range(1, top + 1))


def test_prompt_logprobs_survive_preemption_without_repeats(checkpoint):
    prompts = random_prompts(10, seed=13, low=50, high=60)
    params = [SamplingParams(temperature=0.0, max_tokens=30, prompt_logprobs=0, ignore_eos=True)] * 10
    core = make_core(checkpoint, block_size=4, num_gpu_blocks_override=70, max_num_batched_tokens=40)
    deltas = run(core, prompts, params)
    assert core.scheduler.num_preempted_total > 0
    for index, prompt in enumerate(prompts):
        entries = [entry for delta in deltas[index, 0] for entry in delta.prompt_logprobs or []]
        assert [entry[0][0] for entry in entries[1:]] == prompt[1:]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(checkpoint, dtype):
    """Compares the float32 log probabilities of the chosen tokens; the tokens themselves may differ."""
    prompts = random_prompts(6, seed=17, high=30)
    params = [SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)] * 6
    deltas = run(make_core(checkpoint, dtype=dtype), prompts, params)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for index, prompt in enumerate(prompts):
        output = tokens(deltas[index, 0])
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([[*prompt, *output]])).logits[0], dim=-1)
        gaps = [(rows[len(prompt) + i - 1].max() - rows[len(prompt) + i - 1, t]).item() for i, t in enumerate(output)]
        assert max(gaps) < 0.2, f"{dtype} chose a token that is {max(gaps):.2f} nats less likely in float32"
