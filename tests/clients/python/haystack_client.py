"""Haystack's generator and its pipelines."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from asked import CAPITAL, KEY, MODEL, SECONDS, URL, WEATHER, Person
from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret


def generator(name: str = MODEL, streaming_callback: Any = None, **options: Any) -> OpenAIChatGenerator:
    options = {"temperature": 0, "max_tokens": 24, **options}
    return OpenAIChatGenerator(
        Secret.from_token(KEY), model=name, api_base_url=URL, generation_kwargs=options, timeout=SECONDS,
        max_retries=0, streaming_callback=streaming_callback,
    )  # fmt: skip


def ask(asked: OpenAIChatGenerator, text: str = CAPITAL, **options: Any) -> ChatMessage:
    (reply,) = asked.run([ChatMessage.from_user(text)], **options)["replies"]
    return reply


class TestText:
    def test_a_pipeline(self) -> None:
        pipeline = Pipeline()
        template = [ChatMessage.from_user("What is the capital of {{country}}?")]
        pipeline.add_component("prompt", ChatPromptBuilder(template, required_variables=["country"]))
        pipeline.add_component("model", generator())
        pipeline.connect("prompt.prompt", "model.messages")
        found = pipeline.run({"prompt": {"country": "France"}})
        assert found["model"]["replies"][0].text == "The capital of France is Paris."


class TestStreaming:
    def test_the_pieces_are_the_whole_answer(self) -> None:
        pieces: list[StreamingChunk] = []
        reply = ask(generator(streaming_callback=pieces.append))
        assert len(pieces) > 1
        assert "".join(piece.content for piece in pieces) == reply.text == ask(generator()).text


class TestAsync:
    async def test_text(self) -> None:
        found = await generator().run_async([ChatMessage.from_user(CAPITAL)])
        assert found["replies"][0].text == "The capital of France is Paris."


class TestTools:
    @pytest.mark.parametrize("stream", [False, True])
    def test_there_and_back(self, stream: bool) -> None:
        function = WEATHER["function"]
        tool = Tool(function["name"], function["description"], function["parameters"], function=lambda **_: "sunny")
        named = {"type": "function", "function": {"name": "weather"}}
        callback = (lambda chunk: None) if stream else None
        asked = generator(tool_choice=named, max_tokens=100, streaming_callback=callback)
        question = ChatMessage.from_user("What is the weather in Rome for 3 days?")
        (reply,) = asked.run([question], tools=[tool])["replies"]
        assert reply.tool_call is not None and reply.tool_call.tool_name == "weather"
        assert reply.tool_call.arguments["city"] == "Rome"
        result = ChatMessage.from_tool("sunny", origin=reply.tool_call)
        (after,) = generator().run([question, reply, result])["replies"]
        assert after.text


class TestStructuredOutput:
    def test_a_person(self) -> None:
        text = "Tom is a baker. He is 42 years old. Write it as JSON."
        reply = ask(generator(response_format=Person, max_tokens=200), text)
        assert Person.model_validate_json(reply.text or "").age == 42


class TestSampling:
    def test_a_stop_string_ends_and_there_are_two_choices(self) -> None:
        assert ask(generator(stop=[" is"])).text == "The capital of France"
        asked = generator(n=2, temperature=1, seed=1)
        assert len(asked.run([ChatMessage.from_user("Tell a story.")])["replies"]) == 2


class TestUsage:
    def test_it_adds_up(self) -> None:
        usage = ask(generator()).meta["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


class TestErrors:
    def test_they_are_those_of_the_openai_package(self) -> None:
        with pytest.raises(openai.NotFoundError):
            ask(generator("gpt-4"))
        with pytest.raises(openai.BadRequestError):
            ask(generator(temperature=-1))
