"""Chats, tools and responses of OpenAI's API on a real tritonserver; the gateway runs in the test."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx2
import jsonschema
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from inflight_client import Client
from inflight_gateway.app import build_app
from inflight_gateway.gateway import Gateway
from inflight_gateway.options import GatewayOptions
from inflight_tools.launcher import TritonServer

CHAT: list[Any] = [{"role": "user", "content": "Return a list of"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]


@contextlib.asynccontextmanager
async def opened(server: TritonServer, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    chosen = GatewayOptions(triton=(server.grpc_address,), **options)
    gateway = Gateway(chosen)
    transport = httpx2.ASGITransport(app=build_app(chosen, gateway))  # type: ignore[arg-type]
    async with (
        httpx2.AsyncClient(transport=transport) as http,
        AsyncOpenAI(base_url="http://gateway/v1", api_key="any", max_retries=0, http_client=http) as client,
    ):
        try:
            yield client
        finally:
            await gateway.upstream.close()


async def test_a_chat_equals_tritons(server: TritonServer) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "seed": 5, "n": 2, "temperature": 0.8}
    with Client(server.grpc_address) as direct:
        expected = direct.generate(messages=CHAT, logprobs=2, **options)
    async with opened(server) as client:
        options |= {"model": "demo", "messages": CHAT, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**options)
        stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert [choice.message.content for choice in whole.choices] == [choice.text for choice in expected.choices]
    assert [choice.finish_reason for choice in whole.choices] == [choice.finish_reason for choice in expected.choices]
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == expected.usage.output_tokens
    assert whole.usage.prompt_tokens == expected.usage.input_tokens
    for index, choice in enumerate(whole.choices):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(one.delta.content or "" for one in mine) == choice.message.content
        assert [entry for one in mine if one.logprobs for entry in one.logprobs.content] == choice.logprobs.content
        chosen = expected.choices[index]
        rows = [row[token] for token, row in zip(chosen.token_ids, chosen.logprobs or []) if row]
        assert [(one.token, one.logprob) for one in choice.logprobs.content] == [
            (row.decoded_token, row.logprob) for row in rows
        ]


async def test_without_a_limit_an_answer_fills_the_context(server: TritonServer) -> None:
    long = [{"role": "user", "content": "the list of names " * 480}]
    async with opened(server) as client:
        answer = await client.chat.completions.create(model="demo", messages=long, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length" and answer.usage.total_tokens == 2048
    assert answer.usage.completion_tokens > 16


@pytest.mark.parametrize("format", ["hermes", "llama3_json", "mistral", "mistral_args", "pythonic", "qwen3_coder"])
async def test_calls_that_must_be_made_validate(server: TritonServer, format: str) -> None:
    async with opened(server, tool_call_parser=format) as client:
        for seed, choice in enumerate(["required", {"type": "function", "function": {"name": "weather"}}]):
            options: Any = dict(model="demo", messages=CHAT, tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=400)
            options |= {"parallel_tool_calls": False, "n": 2}
            whole = await client.chat.completions.create(**options)
            made = [[_made(call.function) for call in one.message.tool_calls or []] for one in whole.choices]
            reasons = [one.finish_reason for one in whole.choices]
            for calls, reason, one in zip(made, reasons, whole.choices):
                assert reason == "tool_calls" and one.message.content is None and len(calls) == 1
                name, arguments = calls[0]
                jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"const": {}})
            streamed: list[list[list[str]]] = [[], []]
            async for chunk in await client.chat.completions.create(**options, stream=True):
                for call in chunk.choices[0].delta.tool_calls or []:
                    calls = streamed[chunk.choices[0].index]
                    if call.id:
                        calls.append([call.function.name, ""])
                    calls[-1][1] += call.function.arguments
            assert [[tuple(call) for call in calls] for calls in streamed] == made


def _made(function: Any) -> tuple[str, str]:
    return function.name, function.arguments


class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: list[Literal["Mo", "Tu"]]


async def test_parse_with_pydantic(server: TritonServer) -> None:
    async with opened(server) as client:  # its template has no tools
        chat = await client.chat.completions.parse(
            model="demo", messages=CHAT, response_format=Trip, seed=1, max_tokens=300
        )
        assert isinstance(chat.choices[0].message.parsed, Trip)
        response = await client.responses.parse(
            model="demo", input="A trip:", text_format=Trip, max_output_tokens=300, extra_body={"seed": 2}
        )
        assert isinstance(response.output_parsed, Trip) and response.usage.output_tokens > 5
        tools = [openai.pydantic_function_tool(Trip)]
        options: Any = dict(model="demo", messages=CHAT, tools=tools, tool_choice="required", max_tokens=300, seed=3)
        async with client.chat.completions.stream(**options, parallel_tool_calls=False) as stream:
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Trip)


async def test_the_answer_after_reasoning_is_constrained(server: TritonServer) -> None:
    async with opened(server, reasoning_parser="qwen3") as client:
        options: Any = {
            "max_tokens": 20,
            "n": 8,
            "seed": 4,
            "extra_body": {"structured_outputs": {"regex": "[0-9]{3}"}},
        }
        answer = await client.chat.completions.create(model="demo", messages=CHAT, **options)
    for choice in answer.choices:
        whole = re.fullmatch("[0-9]{3}", choice.message.content or "")
        assert (whole and choice.finish_reason == "stop") or choice.message.reasoning_content


async def test_a_schema_that_cannot_be_enforced_is_refused(server: TritonServer) -> None:
    schema = {"type": "array", "uniqueItems": True}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with opened(server) as client:
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            await client.chat.completions.create(model="demo", messages=CHAT, response_format=form)
