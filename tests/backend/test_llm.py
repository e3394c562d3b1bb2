"""The in-process API on the embedded demo model."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight import LLM, SamplingParams

DEMO = str(Path(__file__).parents[2] / "model_repository" / "demo" / "1" / "checkpoint")
PROMPTS = ["Return a list of", "Open the file and", "The default value is", "é ü 日本"]


@pytest.fixture(scope="module")
def llm():
    torch.set_num_threads(1)
    return LLM(DEMO, dtype="float32", kv_cache_memory="64MiB")


def greedy(max_tokens: int = 24, **changes) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)


def test_text_and_tokens_are_those_of_transformers(llm):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, greedy())):
        ids = tokenizer(prompt, return_tensors="pt")
        assert result.prompt_token_ids == ids["input_ids"][0].tolist()
        with torch.inference_mode():
            whole = model.generate(**ids, max_new_tokens=24, do_sample=False)[0].tolist()
        output = result.outputs[0]
        assert output.token_ids == whole[len(result.prompt_token_ids) :]
        both = tokenizer.decode(whole, skip_special_tokens=True)
        assert both.startswith(prompt)
        assert output.text == both[len(prompt) :]


def test_a_stop_string_cuts_the_text_and_ends_the_request(llm):
    free = llm.generate(PROMPTS[0], greedy(40, ignore_eos=True))[0].outputs[0].text
    stop = free[15:19]
    cut = llm.generate(PROMPTS[0], greedy(40, ignore_eos=True, stop=[stop]))[0].outputs[0]
    assert cut.text == free[: free.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = llm.generate(PROMPTS[0], greedy(40, ignore_eos=True, stop=[stop], include_stop_str_in_output=True))
    assert kept[0].outputs[0].text == free[: free.index(stop)] + stop
    assert not llm.core.has_work
    llm.core.check_integrity()


def test_stream_yields_growing_text_and_aborts_when_closed(llm):
    stream = llm.stream(PROMPTS[1], greedy(60, ignore_eos=True))
    texts = [next(stream).outputs[0].text for _ in range(10)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    other = llm.generate(PROMPTS[2], greedy(5, ignore_eos=True))[0]
    assert other.outputs[0].finish_reason == "length"
    stream.close()
    assert not llm.core.has_work
    llm.core.check_integrity()


def test_n_logprobs_and_defaults(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=8, logprobs=2, prompt_logprobs=1)
    result = llm.generate(PROMPTS[0], params)[0]
    assert len({output.text for output in result.outputs}) == 3
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    for output in result.outputs:
        assert len(output.logprobs) == len(output.token_ids)
        assert output.cumulative_logprob == pytest.approx(sum(entry[0][1] for entry in output.logprobs))
    assert len(llm.generate(PROMPTS[0])[0].outputs[0].token_ids) <= 16


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], greedy(), "the prompt is empty"),
        (["x", [10**6]], greedy(), "token id 1000000 is not in the vocabulary"),
        (["x", "y"], [greedy()], "2 prompts, but 1 params"),
        (["x"], SamplingParams(top_p=2.0), "top_p=2.0 is out of range"),
    ],
)
def test_what_cannot_run_raises_and_leaves_nothing_behind(llm, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert not llm.core.has_work
    llm.core.check_integrity()
