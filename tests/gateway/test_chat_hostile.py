"""Chats and responses with absurd bodies: each gets an answer, and none an error of the gateway."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx2
from hypothesis import given
from hypothesis import strategies as st
from scripted_client import ScriptedClient, text

from inflight_gateway.app import build_app
from inflight_gateway.chat_messages import template_messages
from inflight_gateway.chat_plan import ChatBody
from inflight_gateway.chat_tools import plan_tools
from inflight_gateway.errors import APIError
from inflight_gateway.gateway import Gateway
from inflight_gateway.options import GatewayOptions
from inflight_gateway.response_format import behind_reasoning, calls_or, response_constraint
from inflight_gateway.responses_input import ResponsesBody, chat_of_responses
from inflight_gateway.tool_parsers import FORMATS
from inflight_gateway.upstream import Upstream

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"$ref": "#"}}}, "strict": True}
WORDS = [
    *("function", "auto", "none", "required", "f", "allowed_tools", "json_schema", "json_object", "text", "message"),
    *(
        "user",
        "assistant",
        "tool",
        "developer",
        "function_call",
        "function_call_output",
        "reasoning",
        "input_text",
        "x",
    ),
]
KEYS = [
    *("type", "function", "name", "parameters", "strict", "role", "content", "tool_calls", "tool_call_id", "text"),
    *("schema", "json_schema", "arguments", "call_id", "output", "id", "mode", "tools", "allowed_tools", "summary"),
]
leaves = st.one_of(st.none(), st.booleans(), st.integers(-3, 5), st.sampled_from(WORDS), st.text(max_size=3))
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=9,
)
tools = st.one_of(
    values,
    st.just([{"type": "function", "function": FUNCTION}]),
    st.just([{"type": "function", **FUNCTION}]),
    values.map(lambda value: [{"type": "function", "function": {"name": "f", "parameters": value}}]),
)
messages = st.one_of(st.just("Hi"), st.just([{"role": "user", "content": "Hi"}]), values)


def bodies(kind: Any) -> Any:
    """Bodies with a few strange values; more would hide each other."""
    names = sorted({*kind.__struct_fields__} - {"messages", "input", "model", "tools"})
    usual = st.fixed_dictionaries({}, optional={"tools": tools, "stream": st.booleans()})
    strange = st.dictionaries(st.sampled_from(names), values, max_size=2)
    return st.builds(lambda first, second: {**first, **second}, usual, strange)


def app_of(format: str) -> Any:
    answer = '<think>a</think><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>[f(a=1)]'
    client = ScriptedClient(lambda request: text(answer[:40], answer[40:], n=request.n))
    client.info |= {"tool_format": format, "reasoning_tags": ["<think>", "</think>"], "reasoning_opened": True}
    options = GatewayOptions()
    return build_app(options, Gateway(options, Upstream(options, client)))


async def post(app: Any, path: str, body: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=app)  # raises what the application raises
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return await http.post(path, content=json.dumps(body))


@given(st.sampled_from(["hermes", "pythonic", "qwen3_coder"]), messages, bodies(ChatBody))
async def test_no_chat_body_causes_an_error_of_the_gateway(format: str, chat: Any, body: dict[str, Any]) -> None:
    check(await post(app_of(format), "/v1/chat/completions", {"messages": chat, **body}), body)


@given(st.sampled_from(["hermes", "pythonic"]), messages, bodies(ResponsesBody))
async def test_no_response_body_causes_an_error_of_the_gateway(format: str, items: Any, body: dict[str, Any]) -> None:
    check(await post(app_of(format), "/v1/responses", {"input": items, **body}), body)


def check(response: httpx2.Response, body: dict[str, Any]) -> None:
    if response.status_code == 400:
        assert response.json()["error"]["message"]
        return
    assert response.status_code == 200, response.text
    if body.get("stream"):
        assert '"error":{' not in response.text and response.text.endswith("\n\n")
    else:
        assert response.json()["id"]


choices = st.one_of(
    values, st.sampled_from(["auto", "required"]), st.just({"type": "function", "function": {"name": "f"}})
)


@given(st.sampled_from(sorted(FORMATS)), tools, choices, values, values)
def test_parts_of_bodies_are_refused_by_name(format: str, given: Any, choice: Any, form: Any, kept: Any) -> None:
    with contextlib.suppress(APIError):
        template_messages(given)
    with contextlib.suppress(APIError):
        chat_of_responses(ResponsesBody(input=given, tools=kept, tool_choice=choice))
    constraint: Any = None
    with contextlib.suppress(APIError):
        constraint = response_constraint(form)
    for one in (constraint, kept):
        if isinstance(one, dict):
            behind_reasoning(one, ("<think>", "</think>"), True)
    with contextlib.suppress(APIError):
        plan = plan_tools(given, choice, None, format)
        if plan is not None:
            plan.constraint()
            calls_or(plan.calls(), constraint)
            parser = plan.parser()
            parser.feed('[f(1)]<tool_call>{"name": "f"}<function=f>\n<parameter=a>\n1\n</parameter>')
            parser.finish()
