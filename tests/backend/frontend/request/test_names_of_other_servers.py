"""Keys as TensorRT-LLM, LiteLLM and OpenAI name them, and what model.json says about clients."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from parser_rig import TOKENIZER, parse_with, rejected, sampled

from inflight.engine.sampling_params import SamplingParams


def test_litellm_generate_body() -> None:
    """`parameters` of its body, which Triton spreads over declared inputs and request parameters."""
    params = sampled(max_completion_tokens=7, max_tokens=2000, bad_words=[""], stop_words=[""], stream=False)
    assert params.bad_words_ids == []
    assert params.stop == []
    assert params.max_tokens == 7
    assert sampled({"max_completion_tokens": 7, "max_tokens": 2000}).max_tokens == 7


def test_tensorrt_llm_names() -> None:
    params = sampled(
        max_tokens=20,
        min_length=2,
        bad_words=["list"],
        stop_words=["end", "", "stop"],
        random_seed=2**64 - 1,
        end_id=9,
        pad_id=2,
        beam_width=1,
        length_penalty=1.0,
        return_log_probs=False,
        num_return_sequences=2,
    )
    assert (params.max_tokens, params.min_tokens, params.n, params.seed) == (20, 2, 2, 2**64 - 1)
    assert params.stop == ["end", "stop"]
    assert params.stop_token_ids == [9]
    assert params.bad_words_ids == TOKENIZER.bad_words_ids(["list"])
    assert sampled(end_id=-1).ignore_eos is True


def test_stop_and_stop_words_are_joined() -> None:
    assert sampled(stop=["a"], stop_words=["b", "a"]).stop == ["b", "a"]


def test_a_key_wins_over_its_alias_in_either_order() -> None:
    assert sampled({"seed": 1, "random_seed": 2}).seed == 1
    assert sampled({"random_seed": 2, "seed": 1}).seed == 1


@pytest.mark.parametrize(("default", "prepended"), [(None, "the list"), (False, "the list"), (True, "")])
def test_model_json_sets_the_default_of_exclude_input_in_output(default: bool | None, prepended: str) -> None:
    config = {"exclude_input_in_output": default}
    assert parse_with(config).prepend_text == prepended
    assert parse_with(config, exclude_input_in_output=False).prepend_text == "the list", "the request decides"
    assert parse_with(config, exclude_input_in_output=True).prepend_text == ""
    assert parse_with(config, stream=True).prepend_text == "", "a default never makes a stream an error"


class TestTensorRTLLM:
    CONFIG = MappingProxyType({"wire_format": "tensorrt_llm"})

    def sampled(self, **inputs: Any) -> SamplingParams:
        return parse_with(self.CONFIG, **inputs).engine_request.params

    def test_streaming_ignores_that_the_prompt_is_asked_for(self) -> None:
        request = parse_with(self.CONFIG, stream=True, exclude_input_in_output=False)
        assert (request.prepend_text, request.separate) == ("", True)
        assert parse_with(self.CONFIG, exclude_input_in_output=False).prepend_text == "the list"

    def test_sampling_is_greedy_unless_top_k_or_top_p_is_given(self) -> None:
        assert self.sampled(temperature=0.7).temperature == 0.0
        assert self.sampled(temperature=0.7, top_k=0, top_p=0.0).temperature == 0.0
        assert self.sampled(temperature=0.7, top_k=5).temperature == 0.7
        assert self.sampled(temperature=0.7, top_p=0.9, top_k=0).temperature == 0.7
        assert (self.sampled(top_k=5, top_p=0.0).top_k, self.sampled(top_k=5, top_p=0.0).top_p) == (5, 1.0)
        assert sampled(temperature=0.7).temperature == 0.7, "vllm_backend's clients sample"
        assert "top_p=0.0 is out of range" in rejected(top_p=0.0)

    def test_return_log_probs_asks_the_engine_for_the_chosen_tokens_alone(self) -> None:
        request = parse_with(self.CONFIG, return_log_probs=True)
        assert request.engine_request.params.logprobs == 0
        assert "return_log_probs" in request.returns
        assert not request.shows_logprobs
