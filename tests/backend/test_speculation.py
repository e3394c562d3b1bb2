"""Drafts and the demo model: with every option, each token is the one without drafts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from inflight import LLM, SamplingParams
from inflight.config import ConfigError
from inflight.engine.drafting.draft_cost import DraftPrices
from inflight.engine.integrity import check_core, check_draft_model
from inflight.grammars.spec import GrammarSpec
from inflight.loading.load_errors import LoadError

DEMO = str(Path(__file__).parents[2] / "model_repository" / "demo" / "1" / "checkpoint")
CODE = """\
def read(path):
    with open(path) as file:
        return file.read()

def read(path):
    with open(path) as file:
        return"""
PROMPTS = [CODE, "one two three four one two three four one two", "def main", "naïve 你好 naïve 你"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"ignore_eos": True, "max_tokens": 250},  # long enough to go round in circles
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_k": 20, "top_p": 0.9, "n": 3},
    {"min_p": 0.05, "temperature": 0.9, "seed": 3, "logprobs": 2},
    {"logprobs": 1, "prompt_logprobs": 1},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    {"stop": ["re", "wo t"], "include_stop_str_in_output": True},
    {"min_tokens": 30, "stop_token_ids": [300, 301]},
    {"bad_words_ids": [[300], [310, 320]]},
    {"logit_bias": {300: 5.0}, "allowed_token_ids": list(range(200, 900))},
    {"grammar": GrammarSpec("regex", "(one|two|three| ){3,40}"), "temperature": 0.8, "seed": 4},
    {"grammar": GrammarSpec("json_schema", '{"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 6}')},
]
ALL = [
    (prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **options}))
    for prompt, options in itertools.product(PROMPTS, OPTIONS)
]


def free_drafts(prices: DraftPrices, num_sequences: int) -> None:
    prices.price, prices.room = 0.01, 64


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights, with the demo model's vocabulary."""
    folder = tmp_path_factory.mktemp("small")
    llama(AutoConfig.from_pretrained(DEMO).vocab_size).save_pretrained(folder)
    return str(folder)


def llama(vocab_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def without() -> list[Any]:
    return answers(LLM(DEMO, dtype="float32", kv_cache_memory="64MiB"))


def answers(llm: LLM) -> list[Any]:
    found = llm.generate([prompt for prompt, _ in ALL], [params for _, params in ALL])
    check_core(llm.core)
    return [(result.prompt_logprobs, result.outputs) for result in found]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"method": "suffix"}, {}),
        pytest.param(
            {"method": "ngram", "prompt_lookup_min": 1}, {"native_forward": False}, marks=pytest.mark.nightly
        ),
        pytest.param({"method": "suffix"}, {"async_scheduling": True}, marks=pytest.mark.nightly),
        pytest.param(
            {"method": "suffix", "num_speculative_tokens": 4},
            {"num_gpu_blocks_override": 40, "max_model_len": 512},
            marks=pytest.mark.nightly,
        ),
        # The model itself, and one that knows nothing.
        pytest.param({"model": DEMO}, {}, marks=pytest.mark.nightly),
        ({"model": DEMO, "num_speculative_tokens": 6, "kv_cache_memory": "4MiB"}, {"async_scheduling": True}),
        pytest.param(
            {"model": "small"}, {"native_forward": False, "max_num_batched_tokens": 64}, marks=pytest.mark.nightly
        ),
        ({"method": "suffix"}, {"swap_space": "16MiB", "preemption_mode": "swap", "num_gpu_blocks_override": 40}
         | {"max_model_len": 512, "enable_prefix_caching": False, "max_num_batched_tokens": 64}),
    ],
)  # fmt: skip
def test_the_answers_are_those_without_drafts(
    without: list[Any],
    small_model: str,
    config: dict[str, Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DraftPrices, "begin", free_drafts)
    if config.get("model") == "small":
        config = {**config, "model": small_model}
    llm = LLM(
        DEMO,
        **{"dtype": "float32", "kv_cache_memory": "64MiB", "admission": "free_blocks", **options},
        speculative_config=config,
    )
    found = answers(llm)
    exact = options.get("native_forward", True)  # else log probabilities depend on the batch in their last bits
    for (prompt, params), one, other in zip(ALL, found, without):
        if exact:
            assert one == other, (prompt, params)
        assert [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in one[1]] == [
            (o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in other[1]
        ], (prompt, params)
    counts = llm.core.scheduler.policies.draft_counts
    if config.get("model") == small_model:
        assert counts.tokens > 1000
    elif config.get("model") == DEMO:
        assert counts.accepted > 0.9 * counts.tokens > 100, "wrong only where a grammar or a last token says so"
    else:
        assert counts.accepted > 100 and counts.tokens > counts.accepted, "some were right, some were not"
    if "model" in config:
        safe: Any = llm.core.scheduler.policies.drafter
        check_draft_model(safe.inner._inner._guesser._model)


@pytest.mark.nightly
def test_greedy_text_with_drafts_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftPrices, "begin", free_drafts)
    llm = LLM(DEMO, dtype="float32", kv_cache_memory="64MiB", speculative_config={"method": "suffix"})
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    results = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    for prompt, result in zip(PROMPTS, results):
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            whole = model.generate(**ids, min_new_tokens=200, max_new_tokens=200, do_sample=False, eos_token_id=-1)
        assert result.outputs[0].token_ids == whole[0, ids["input_ids"].shape[1] :].tolist()
    assert llm.core.scheduler.policies.draft_counts.accepted > 50


def test_a_draft_model_with_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    llama(77).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"speculative_config: model='.*' has a vocabulary of 77 tokens, .*tokenizer"):
        LLM(DEMO, speculative_config={"model": str(tmp_path)})


@pytest.mark.parametrize("bad", [{"model": "/nowhere"}, {"model": DEMO, "kv_cache_memory": "1KiB"}])
def test_a_draft_model_that_cannot_be_loaded_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match="speculative_config: "):
        LLM(DEMO, speculative_config=bad)
