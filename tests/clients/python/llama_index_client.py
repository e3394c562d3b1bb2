"""LlamaIndex's OpenAILike."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from asked import CAPITAL, KEY, MODEL, SECONDS, URL, Person
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

CHAT = [ChatMessage(role="user", content=CAPITAL)]
PARIS = "The capital of France is Paris."


def model(name: str = MODEL, key: str = KEY, **options: Any) -> OpenAILike:
    options = {"temperature": 0, "max_tokens": 24, "is_chat_model": True, "context_window": 4096, **options}
    return OpenAILike(model=name, api_base=URL, api_key=key, max_retries=0, timeout=SECONDS, **options)


class TestText:
    def test_a_chat(self) -> None:
        assert model().chat(CHAT).message.content == PARIS

    def test_a_completion(self) -> None:
        assert "Paris" in model(is_chat_model=False).complete("The capital of France is").text


class TestStreaming:
    def test_the_pieces_are_the_whole_answer(self) -> None:
        pieces = list(model().stream_chat(CHAT))
        assert len(pieces) > 1 and "".join(piece.delta or "" for piece in pieces) == PARIS


class TestAsync:
    async def test_text_and_stream(self) -> None:
        assert (await model().achat(CHAT)).message.content == PARIS
        stream = await model().astream_chat(CHAT)
        assert "".join([piece.delta or "" async for piece in stream]) == PARIS


class TestTools:
    def test_required(self) -> None:
        def weather(city: str) -> str:
            """The weather in a city."""
            return "sunny"

        asked = model(is_function_calling_model=True, max_tokens=100)
        answer = asked.chat_with_tools(
            [FunctionTool.from_defaults(weather)], user_msg="What is the weather in Rome?", tool_required=True
        )
        calls = asked.get_tool_calls_from_response(answer)
        assert calls and calls[0].tool_name == "weather" and isinstance(calls[0].tool_kwargs["city"], str)


class TestStructuredOutput:
    @pytest.mark.parametrize("by_tool", [True, False])
    def test_a_person(self, by_tool: bool) -> None:
        prompt = PromptTemplate("{text} Write it as JSON.")
        asked = model(is_function_calling_model=by_tool, should_use_structured_outputs=not by_tool, max_tokens=200)
        found = asked.structured_predict(Person, prompt, text="Tom is a baker. He is 42 years old.")
        assert isinstance(found, Person) and found.age == 42


class TestErrors:
    def test_they_are_those_of_the_openai_package(self) -> None:
        with pytest.raises(openai.NotFoundError):
            model("gpt-4").chat(CHAT)
        with pytest.raises(openai.AuthenticationError):
            model(key="wrong").chat(CHAT)
        with pytest.raises(openai.BadRequestError):
            model(temperature=0, additional_kwargs={"top_p": 7}).chat(CHAT)
