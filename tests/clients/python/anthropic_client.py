"""Anthropic's own Python package, at `/v1/messages`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from asked import ASK_PERSON, ASK_WEATHER, CHAT, KEY, MODEL, RAIN, ROOT, SECONDS, Person, Weather

PARIS = "The capital of France is Paris."
# This version of the package has no parameter `temperature`.
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}
LONGER = {**GREEDY, "max_tokens": 200}
TOOL: Any = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {**Weather.model_json_schema(), "additionalProperties": False},
}
NAMED: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client() -> Iterator[Anthropic]:
    with Anthropic(base_url=ROOT, api_key=KEY, max_retries=0, timeout=SECONDS) as client:
        yield client


class TestText:
    def test_a_message(self, client: Anthropic) -> None:
        answer = client.messages.create(messages=CHAT, **GREEDY)
        assert [block.type for block in answer.content] == ["text"] and answer.content[0].text == PARIS
        assert (answer.stop_reason, answer.role, answer.model) == ("end_turn", "assistant", MODEL)

    def test_a_system_text_and_blocks(self, client: Anthropic) -> None:
        blocks = [{"type": "text", "text": CHAT[0]["content"], "cache_control": {"type": "ephemeral"}}]
        answer = client.messages.create(
            system=[{"type": "text", "text": "Be brief."}], messages=[{"role": "user", "content": blocks}], **GREEDY
        )
        assert "Paris" in answer.content[0].text

    def test_a_cut_answer(self, client: Anthropic) -> None:
        answer = client.messages.create(messages=RAIN, **{**GREEDY, "max_tokens": 4})
        assert answer.stop_reason == "max_tokens"


class TestStreaming:
    def test_the_pieces_are_the_whole_answer(self, client: Anthropic) -> None:
        whole = client.messages.create(messages=RAIN, **GREEDY)
        with client.messages.stream(messages=RAIN, **GREEDY) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        assert text == last.content[0].text == whole.content[0].text
        assert last.stop_reason == whole.stop_reason and last.usage.output_tokens == whole.usage.output_tokens

    def test_the_events_as_they_come(self, client: Anthropic) -> None:
        kinds = [event.type for event in client.messages.create(messages=CHAT, stream=True, **GREEDY)]
        kinds = [kind for kind in kinds if kind != "ping"]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


class TestTools:
    def test_there_and_back(self, client: Anthropic) -> None:
        answer = client.messages.create(messages=ASK_WEATHER, tools=[TOOL], tool_choice=NAMED, **LONGER)
        assert answer.stop_reason == "tool_use"
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert call.name == "weather" and Weather.model_validate(call.input).city == "Rome"
        result: Any = {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}],
        }
        history: Any = [*ASK_WEATHER, {"role": "assistant", "content": answer.content}, result]
        after = client.messages.create(messages=history, tools=[TOOL], tool_choice={"type": "none"}, **GREEDY)
        assert after.content[0].type == "text" and after.content[0].text

    def test_a_streamed_call(self, client: Anthropic) -> None:
        with client.messages.stream(messages=ASK_WEATHER, tools=[TOOL], tool_choice=NAMED, **LONGER) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            message = stream.get_final_message()
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert Weather.model_validate_json("".join(pieces)) == Weather.model_validate(call.input)

    def test_any_of_them(self, client: Anthropic) -> None:
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        answer = client.messages.create(messages=ASK_WEATHER, tools=[TOOL], tool_choice=choice, **LONGER)
        assert [block.type for block in answer.content] == ["tool_use"]


class TestStructuredOutput:
    def test_parse(self, client: Anthropic) -> None:
        answer = client.messages.parse(messages=ASK_PERSON, output_format=Person, **LONGER)
        assert answer.parsed_output is not None and answer.parsed_output.age == 42


class TestSampling:
    def test_a_stop_sequence(self, client: Anthropic) -> None:
        answer = client.messages.create(messages=CHAT, stop_sequences=[" is"], **GREEDY)
        assert answer.content[0].text == "The capital of France"
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " is")


class TestUsage:
    def test_the_prompt_is_counted_as_it_was_used(self, client: Anthropic) -> None:
        usage = client.messages.create(messages=CHAT, **GREEDY).usage
        counted = client.messages.count_tokens(model=MODEL, messages=CHAT).input_tokens
        cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        assert usage.input_tokens + cached == counted and usage.output_tokens > 0


class TestErrors:
    def test_they_become_the_exceptions_of_the_library(self, client: Anthropic) -> None:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.create(messages=CHAT, **{**GREEDY, "model": "claude"})
        assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").messages.create(messages=CHAT, **GREEDY)
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(messages=CHAT, **{**GREEDY, "max_tokens": 0})


class TestCancellation:
    def test_a_timeout_and_a_stream_that_is_left(self, client: Anthropic) -> None:
        endless: dict[str, Any] = {"model": MODEL, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
        with pytest.raises(anthropic.APITimeoutError):
            client.with_options(timeout=1.0).messages.create(messages=RAIN, **endless)
        with client.messages.stream(messages=RAIN, **endless) as stream:
            next(iter(stream.text_stream))


class TestAsync:
    async def test_two_streams_side_by_side(self) -> None:
        async with AsyncAnthropic(base_url=ROOT, api_key=KEY, max_retries=0, timeout=SECONDS) as client:

            async def text() -> str:
                async with client.messages.stream(messages=CHAT, **GREEDY) as stream:
                    return "".join([piece async for piece in stream.text_stream])

            assert await asyncio.gather(text(), text()) == [PARIS, PARIS]
