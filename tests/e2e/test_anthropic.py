"""Anthropic's Messages API on a real tritonserver; the gateway runs in the test."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from inflight_client import Client
from inflight_gateway.app import build_app
from inflight_gateway.gateway import Gateway
from inflight_gateway.options import GatewayOptions
from inflight_tools.launcher import TritonServer

CHAT: list[Any] = [{"role": "user", "content": "Return a list of"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS: list[Any] = [{"name": "weather", "input_schema": {**CITY, "additionalProperties": False}}]
ASKED: dict[str, Any] = {"model": "demo", "messages": CHAT, "max_tokens": 24, "seed": 5, "temperature": 0.8}


@contextlib.asynccontextmanager
async def opened(server: TritonServer) -> AsyncIterator[httpx.AsyncClient]:
    options = GatewayOptions(triton=(server.grpc_address,))
    gateway = Gateway(options)
    transport = httpx.ASGITransport(build_app(options, gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as http:
        try:
            yield http
        finally:
            await gateway.upstream.close()


def events_of(stream: str) -> list[dict[str, Any]]:
    return [json.loads(event.partition("\ndata: ")[2]) for event in stream.strip().split("\n\n")]


async def test_a_message_equals_tritons_whole_and_streamed(server: TritonServer) -> None:
    with Client(server.grpc_address) as direct:
        expected = direct.generate(messages=CHAT, max_tokens=24, seed=5, temperature=0.8)
    async with opened(server) as http:
        whole = (await http.post("/v1/messages", json=ASKED)).json()
        events = events_of((await http.post("/v1/messages", json={**ASKED, "stream": True})).text)
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert whole["content"] == [{"type": "text", "text": expected.text}] and text == expected.text
    assert whole["stop_reason"] == "max_tokens" and events[-2]["delta"]["stop_reason"] == "max_tokens"
    for usage in (whole["usage"], events[0]["message"]["usage"] | events[-2]["usage"]):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected.usage.input_tokens
        assert usage["output_tokens"] == expected.usage.output_tokens


async def test_the_stop_sequence_is_named(server: TritonServer) -> None:
    async with opened(server) as http:
        text = (await http.post("/v1/messages", json=ASKED)).json()["content"][0]["text"]
        stop = text[5:8]  # it can span tokens
        asked = {**ASKED, "stop_sequences": ["never written", stop]}
        whole = (await http.post("/v1/messages", json=asked)).json()
        events = events_of((await http.post("/v1/messages", json={**asked, "stream": True})).text)
    ended = {"stop_reason": "stop_sequence", "stop_sequence": stop}
    assert {key: whole[key] for key in ended} == events[-2]["delta"] == ended
    assert whole["content"][0]["text"] == text[: text.index(stop)]


async def test_tools_there_and_back_and_the_tokens_of_their_prompts(server: TritonServer) -> None:
    async with opened(server) as http:
        asked = {**ASKED, "max_tokens": 100, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}
        called = (await http.post("/v1/messages", json=asked)).json()
        call = called["content"][-1]
        assert called["stop_reason"] == "tool_use" and call["input"]["city"] in ("Oslo", "Rome")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sun"}
        history = [*CHAT, {"role": "assistant", "content": called["content"]}, {"role": "user", "content": [result]}]
        prompt = {"model": "demo", "system": "Be brief.", "messages": history, "tools": TOOLS}
        counted = (await http.post("/v1/messages/count_tokens", json=prompt)).json()
        usage = (await http.post("/v1/messages", json={**prompt, "max_tokens": 4})).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_the_tokens_of_a_response_are_counted(server: TritonServer) -> None:
    async with opened(server) as http:
        prompt = {"model": "demo", "input": "Return a list of", "instructions": "Be brief."}
        counted = (await http.post("/v1/responses/input_tokens", json=prompt)).json()
        usage = (await http.post("/v1/responses", json={**prompt, "max_output_tokens": 2})).json()["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


async def test_claude_code_is_told_that_a_prompt_is_too_long(server: TritonServer) -> None:
    async with opened(server) as http:
        asked = {**ASKED, "messages": [{"role": "user", "content": "the list of names " * 1000}]}
        counted = (await http.post("/v1/messages/count_tokens", json=asked)).json()["input_tokens"]
        refused = await http.post("/v1/messages", json={**asked, "stream": True})
        far = {**ASKED, "messages": [{"role": "user", "content": "the list of names " * 50_000}]}
        refused_at_sight = await http.post("/v1/messages", json=far)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith(f"prompt is too long: {counted} tokens > 2047 maximum; ")
    assert refused_at_sight.json()["error"]["message"].startswith("prompt is too long; the prompt has ")
