"""Ollama's Python package, at `/api`."""

from __future__ import annotations

from typing import Any

import ollama
import pytest
from asked import (
    ASK_PERSON,
    ASK_WEATHER,
    BEST,
    CAPITAL,
    CHAT,
    DOCUMENTS,
    KEY,
    MODEL,
    QUERY,
    RAIN,
    ROOT,
    SECONDS,
    SIZE,
    WEATHER,
    Person,
)

PARIS = "The capital of France is Paris."
GREEDY = {"temperature": 0, "num_predict": 24}
LONGER = {**GREEDY, "num_predict": 200}
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def client() -> ollama.Client:
    return ollama.Client(ROOT, headers=HEADERS, timeout=SECONDS)


class TestText:
    def test_a_chat(self, client: ollama.Client) -> None:
        answer = client.chat(MODEL, CHAT, options=GREEDY)
        assert answer.message.content == PARIS and answer.done and answer.done_reason == "stop"

    def test_a_prompt(self, client: ollama.Client) -> None:
        assert client.generate(MODEL, CAPITAL, options=GREEDY).response == PARIS
        assert "Paris" in (client.generate(MODEL, "The capital of France is", raw=True, options=GREEDY).response or "")

    def test_the_models(self, client: ollama.Client) -> None:
        assert [model.model for model in client.list().models] == [f"{MODEL}:latest"]
        assert "completion" in (client.show(MODEL).capabilities or [])
        assert client.ps().models


class TestStreaming:
    def test_the_pieces_are_the_whole_answer(self, client: ollama.Client) -> None:
        whole = client.chat(MODEL, RAIN, options=GREEDY)
        parts = list(client.chat(MODEL, RAIN, stream=True, options=GREEDY))
        assert "".join(part.message.content or "" for part in parts) == whole.message.content
        assert parts[-1].done and parts[-1].done_reason == whole.done_reason == "length"


class TestTools:
    def test_a_call_goes_back(self, client: ollama.Client) -> None:
        """Ollama's API has no named or required tools: the model decides."""
        answer = client.chat(MODEL, ASK_WEATHER, tools=[WEATHER], options=GREEDY)
        assert answer.message.content or answer.message.tool_calls
        call = {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 3}}}
        history = [
            *ASK_WEATHER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "weather", "content": "sunny"},
        ]
        assert client.chat(MODEL, history, tools=[WEATHER], options=GREEDY).message.content


class TestStructuredOutput:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_person(self, client: ollama.Client, stream: bool) -> None:
        asked: Any = client.chat(MODEL, ASK_PERSON, format=Person.model_json_schema(), stream=stream, options=LONGER)
        parts = list(asked) if stream else [asked]
        assert Person.model_validate_json("".join(part.message.content or "" for part in parts)).age == 42


class TestSampling:
    def test_a_seed_repeats_and_a_stop_string_ends(self, client: ollama.Client) -> None:
        warm = {"temperature": 1, "seed": 5, "num_predict": 16}
        one, two = (client.chat(MODEL, RAIN, options=warm).message.content for _ in range(2))
        assert one == two
        answer = client.chat(MODEL, CHAT, options={**GREEDY, "stop": [" is"]})
        assert answer.message.content == "The capital of France"


class TestLogProbabilities:
    def test_of_each_token(self, client: ollama.Client) -> None:
        answer = client.chat(MODEL, CHAT, logprobs=True, top_logprobs=2, options=GREEDY)
        assert answer.logprobs and all(len(token.top_logprobs or []) == 2 for token in answer.logprobs)


class TestUsage:
    def test_whole_and_streamed(self, client: ollama.Client) -> None:
        whole = client.chat(MODEL, CHAT, options=GREEDY)
        *_, last = client.chat(MODEL, CHAT, stream=True, options=GREEDY)
        assert whole.prompt_eval_count == last.prompt_eval_count and whole.eval_count == last.eval_count
        assert whole.eval_count and whole.total_duration and whole.eval_duration


class TestErrors:
    def test_they_have_the_status(self, client: ollama.Client) -> None:
        with pytest.raises(ollama.ResponseError) as unknown:
            client.chat("llama", CHAT)
        assert unknown.value.status_code == 404
        with pytest.raises(ollama.ResponseError) as denied:
            ollama.Client(ROOT, headers={"Authorization": "Bearer wrong"}).chat(MODEL, CHAT)
        assert denied.value.status_code == 401
        with pytest.raises(ollama.ResponseError) as wrong:
            client.chat(MODEL, CHAT, options={"temperature": -1})
        assert wrong.value.status_code == 400


class TestAsync:
    async def test_text_and_stream(self) -> None:
        client = ollama.AsyncClient(ROOT, headers=HEADERS, timeout=SECONDS)
        assert (await client.chat(MODEL, CHAT, options=GREEDY)).message.content == PARIS
        parts = await client.chat(MODEL, CHAT, stream=True, options=GREEDY)
        assert "".join([part.message.content or "" async for part in parts]) == PARIS


class TestEmbeddings:
    def test_a_list_and_a_text(self, client: ollama.Client) -> None:
        answer = client.embed(MODEL, DOCUMENTS)
        assert [len(vector) for vector in answer.embeddings] == [SIZE] * 3 and answer.prompt_eval_count
        assert sum(x * x for x in answer.embeddings[BEST]) == pytest.approx(1.0, abs=1e-5)
        assert client.embed(MODEL, QUERY).embeddings[0] == pytest.approx(answer.embeddings[BEST], abs=1e-5)
        assert len(client.embeddings(MODEL, QUERY).embedding) == SIZE

    def test_a_long_text_is_cut_off_unless_it_must_not_be(self, client: ollama.Client) -> None:
        longer = "rain " * 6000
        assert client.embed(MODEL, longer).prompt_eval_count == 4096
        with pytest.raises(ollama.ResponseError, match="input"):
            client.embed(MODEL, longer, truncate=False)
