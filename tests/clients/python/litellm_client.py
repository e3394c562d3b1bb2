"""LiteLLM, as a client of an OpenAI-compatible server (`openai/`), of vLLM (`hosted_vllm/`), Jina and Cohere."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from asked import (
    ASK_PERSON,
    ASK_WEATHER,
    BEST,
    CHAT,
    DOCUMENTS,
    KEY,
    MODEL,
    NAMED,
    QUERY,
    RAIN,
    ROOT,
    SECONDS,
    SIZE,
    URL,
    WEATHER,
    Person,
    Weather,
)

PARIS = "The capital of France is Paris."


@pytest.fixture(params=["openai", "hosted_vllm"])
def greedy(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{MODEL}", "api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": 24,
        "num_retries": 0, "timeout": SECONDS,
    }  # fmt: skip


class TestText:
    def test_a_chat(self, greedy: dict[str, Any]) -> None:
        answer = litellm.completion(messages=CHAT, **greedy)
        assert answer.choices[0].message.content == PARIS and answer.choices[0].finish_reason == "stop"

    def test_a_completion(self, greedy: dict[str, Any]) -> None:
        if greedy["model"].startswith("hosted_vllm/"):
            pytest.skip("LiteLLM sends completions to text-completion-openai/")
        asked = {**greedy, "model": f"text-completion-openai/{MODEL}"}
        assert "Paris" in litellm.text_completion(prompt="The capital of France is", **asked).choices[0].text


class TestStreaming:
    def test_the_pieces_are_the_whole_answer(self, greedy: dict[str, Any]) -> None:
        whole = litellm.completion(messages=RAIN, **greedy).choices[0].message.content
        chunks = list(litellm.completion(messages=RAIN, stream=True, **greedy))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
        assert chunks[-1].choices[0].finish_reason == "length"


class TestAsync:
    async def test_text_and_stream(self, greedy: dict[str, Any]) -> None:
        assert (await litellm.acompletion(messages=CHAT, **greedy)).choices[0].message.content == PARIS
        stream = await litellm.acompletion(messages=CHAT, stream=True, **greedy)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == PARIS


class TestTools:
    def test_a_named_tool_there_and_back(self, greedy: dict[str, Any]) -> None:
        asked = {**greedy, "max_tokens": 100}
        choice = litellm.completion(messages=ASK_WEATHER, tools=[WEATHER], tool_choice=NAMED, **asked).choices[0]
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather" and choice.finish_reason == "tool_calls"
        assert Weather.model_validate_json(call.function.arguments).city == "Rome"
        history = [*ASK_WEATHER, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        assert litellm.completion(messages=history, **greedy).choices[0].message.content

    def test_a_streamed_call(self, greedy: dict[str, Any]) -> None:
        asked = {**greedy, "max_tokens": 100, "messages": ASK_WEATHER, "tools": [WEATHER], "tool_choice": NAMED}
        whole = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked)))
        assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments)["city"] == "Rome"


class TestStructuredOutput:
    def test_a_person(self, greedy: dict[str, Any]) -> None:
        answer = litellm.completion(messages=ASK_PERSON, response_format=Person, **{**greedy, "max_tokens": 200})
        assert Person.model_validate_json(answer.choices[0].message.content).age == 42


class TestSampling:
    def test_a_seed_repeats_a_stop_string_ends_and_there_are_two_choices(self, greedy: dict[str, Any]) -> None:
        warm = {**greedy, "temperature": 1, "seed": 5}
        texts = {litellm.completion(messages=RAIN, **warm).choices[0].message.content for _ in range(2)}
        assert len(texts) == 1
        assert litellm.completion(messages=CHAT, stop=[" is"], **greedy).choices[0].message.content == (
            "The capital of France"
        )
        assert len(litellm.completion(messages=RAIN, n=2, **warm).choices) == 2


class TestLogProbabilities:
    def test_of_each_token(self, greedy: dict[str, Any]) -> None:
        answer = litellm.completion(messages=CHAT, logprobs=True, top_logprobs=2, **greedy)
        content = answer.choices[0].logprobs.content
        assert content and all(len(token.top_logprobs) == 2 for token in content)


class TestUsage:
    def test_whole_and_streamed(self, greedy: dict[str, Any]) -> None:
        usage = litellm.completion(messages=CHAT, **greedy).usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        chunks = list(litellm.completion(messages=CHAT, stream=True, stream_options={"include_usage": True}, **greedy))
        assert chunks[-1].usage.completion_tokens == usage.completion_tokens


class TestErrors:
    def test_they_become_the_exceptions_of_the_library(self, greedy: dict[str, Any]) -> None:
        with pytest.raises(litellm.NotFoundError):
            litellm.completion(messages=CHAT, **{**greedy, "model": greedy["model"].replace(MODEL, "gpt-4")})
        with pytest.raises(litellm.AuthenticationError):
            litellm.completion(messages=CHAT, **{**greedy, "api_key": "wrong"})
        with pytest.raises(litellm.BadRequestError):
            litellm.completion(messages=CHAT, **{**greedy, "temperature": -1})


class TestCancellation:
    def test_a_timeout(self, greedy: dict[str, Any]) -> None:
        with pytest.raises(litellm.Timeout):
            asked = {**greedy, "max_tokens": 3000, "timeout": 1.0, "extra_body": {"ignore_eos": True}}
            litellm.completion(messages=RAIN, **asked)


class TestResponses:
    def test_text(self, greedy: dict[str, Any]) -> None:
        if greedy["model"].startswith("hosted_vllm/"):
            pytest.skip("the same path")
        names = ("model", "api_base", "api_key", "temperature", "timeout")
        asked = {name: greedy[name] for name in names}
        answer = litellm.responses(input=CHAT[0]["content"], max_output_tokens=24, **asked)
        assert answer.output[0].content[0].text == PARIS


class TestEmbeddings:
    async def test_a_list(self, greedy: dict[str, Any]) -> None:
        asked = {name: greedy[name] for name in ("model", "api_base", "api_key", "timeout")}
        answer = litellm.embedding(input=[QUERY, *DOCUMENTS], **asked)
        vectors = [item["embedding"] for item in answer.data]
        assert [len(vector) for vector in vectors] == [SIZE] * 4 and vectors[0] == vectors[1 + BEST]
        assert answer.usage.prompt_tokens > 0
        again = await litellm.aembedding(input=[QUERY], **asked)
        assert again.data[0]["embedding"] == pytest.approx(vectors[0], abs=1e-6)


class TestReranking:
    @pytest.mark.parametrize(
        ("provider", "base"), [("hosted_vllm", URL), ("jina_ai", URL), ("cohere", f"{ROOT}/v2/rerank")]
    )
    async def test_the_best_come_first(self, provider: str, base: str) -> None:
        asked: dict[str, Any] = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": KEY}
        answer = litellm.rerank(query=QUERY, documents=DOCUMENTS, top_n=2, **asked)
        assert answer.results is not None and len(answer.results) == 2
        assert answer.results[0]["index"] == BEST and answer.results[0]["relevance_score"] == pytest.approx(1.0)
        again = await litellm.arerank(query=QUERY, documents=DOCUMENTS, **asked)
        assert again.results is not None and sorted(result["index"] for result in again.results) == [0, 1, 2]
