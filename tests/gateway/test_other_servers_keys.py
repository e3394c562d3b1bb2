"""Keys that clients of other servers send: translated, or named in a warning."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from scripted_client import ScriptedClient, text

from inflight_client import ChoiceDelta, Logprob, StreamChunk

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, "/v1/completions": {"prompt": "a"}}
ALL = {**BODIES, "/v1/responses": {"input": "a"}}


def ok(request):
    return text("a", n=request.n)


def chat_of(front: Any) -> dict[str, Any]:
    """The template's options of the last request."""
    return front.client.requests[-1].chat


@pytest.mark.parametrize("path", sorted(ALL))
async def test_older_names_of_constraints(start, path):
    front = await start(ok)
    for key, value in (
        ("json", {"type": "object"}),
        ("regex", "a+"),
        ("choice", ["a", "b"]),
        ("grammar", "root ::= x"),
    ):
        response = await front.post(path, {**ALL[path], f"guided_{key}": value})
        assert response.status_code == 200 and "x-inflight-warning" not in response.headers
        assert front.client.requests[-1].sampling["structured_outputs"] == {key: value}
        twice = {**ALL[path], f"guided_{key}": value, "structured_outputs": {"regex": "b"}}
        response = await front.post(path, twice)
        assert response.status_code == 400 and response.json()["error"]["param"] == f"guided_{key}"


@pytest.mark.parametrize("path", sorted(ALL))
async def test_what_has_no_effect_is_said(start, path):
    front = await start(ok)
    without = {"num_ctx": 4096, "keep_alive": "5m", "vllm_xargs": {"a": 1}, "store": True}
    for key, value in {**without, "cache_hit_threshold": 0.5}.items():
        response = await front.post(path, {**ALL[path], key: value})
        assert response.status_code == 200
        assert response.headers["x-inflight-warning"].startswith(f"{key} has no effect: ")
    for key, value in (("cache_prompt", False), ("client_metadata", {"a": 1}), ("store", False), ("vllm_xargs", {})):
        response = await front.post(path, {**ALL[path], key: value})
        assert response.status_code == 200 and "x-inflight-warning" not in response.headers
    shown = (await front.http.get("/metrics")).text
    assert f'inflight_gateway_warnings_total{{endpoint="{path}",reason="ignored"}} 5.0' in shown


ON, OFF = ({"chat_template_kwargs": dict.fromkeys(("enable_thinking", "thinking"), on)} for on in (True, False))


def effort(name: str) -> dict[str, Any]:
    """The variables of the template for an effort."""
    switches = (OFF if name == "none" else ON)["chat_template_kwargs"]
    return {"chat_template_kwargs": {"reasoning_effort": name, **switches}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"think": True}, ON),
        ({"think": False}, OFF),
        ({"think": "low"}, effort("low")),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, ON),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": False}, OFF),
        ({"reasoning": {"effort": "high"}}, effort("high")),
        ({"reasoning_effort": "low"}, effort("low")),
        ({"reasoning_effort": "none"}, effort("none")),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False}},
        ),
        ({"reasoning": {"effort": "none"}}, OFF),
        ({"reasoning": {"enabled": True, "max_tokens": 100}}, ON),
        (
            {"think": False, "chat_template_kwargs": {"enable_thinking": True}},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": False}},
        ),
    ],
)
async def test_thinking_is_switched(start, given, expected):
    front = await start(ok)
    response = await front.post(CHAT, {"messages": HI, **given})
    assert response.status_code == 200 and chat_of(front) == expected
    budget = "budget_tokens" in str(given) or "max_tokens" in str(given)
    assert ("has no effect: reasoning ends" in response.headers.get("x-inflight-warning", "")) == budget


@pytest.mark.parametrize(
    "wrong", [{"think": "much"}, {"think": 1}, {"thinking": {"type": "x"}}, {"thinking": 3}, {"reasoning": "low"}]
)
async def test_what_is_wrong_with_thinking_is_named(start, wrong):
    front = await start(ok)
    response = await front.post(CHAT, {"messages": HI, **wrong})
    assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(wrong))


async def test_reasoning_is_excluded(start):
    front = await start(lambda request: text("<think>hm</think>5"))
    front.client.info.update(reasoning_tags=["<think>", "</think>"])
    message = (await front.post(CHAT, {"messages": HI, "reasoning": {"exclude": True}})).json()["choices"][0]["message"]
    assert message["content"] == "5" and "reasoning" not in message


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_values_that_other_servers_take(start, path):
    front = await start(ok)
    for given, expected in [
        ({"max_tokens": -1}, {"max_tokens": 2048}),
        ({"max_tokens": "-1"}, {"max_tokens": 2048}),
        ({"max_tokens": 10.0, "top_p": 0}, {"max_tokens": 10, "top_k": 1}),
        ({"max_tokens": 5, "best_of": 2, "n": 2}, {"max_tokens": 5, "n": 2}),
        ({"max_tokens": 5, "best_of": 1}, {"max_tokens": 5}),
        (
            {"max_tokens": 5, "response_format": {"type": "json_object"}},
            {"max_tokens": 5, "structured_outputs": {"json_object": True}},
        ),
    ]:
        response = await front.post(path, {**BODIES[path], **given})
        assert response.status_code == 200 and "x-inflight-warning" not in response.headers
        assert front.client.requests[-1].sampling == expected
    for wrong in (
        {"best_of": 2},
        {"best_of": 1, "n": 2},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    ):
        assert (await front.post(path, {**BODIES[path], **wrong})).status_code == 400, wrong


async def test_the_longest_answer_of_a_response(start):
    front = await start(ok)
    assert (await front.post("/v1/responses", {"input": "a", "max_output_tokens": -1})).status_code == 200
    assert front.client.requests[-1].sampling["max_tokens"] == 2048


def with_logprobs(request: Any) -> list[StreamChunk]:
    row = {7: Logprob(-0.5, 1, "a"), 8: Logprob(-1.5, 2, "b")}
    return [StreamChunk([ChoiceDelta(0, "a", [7], 1, "stop", [row])], 3)]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_named_by_their_ids(start, stream):
    front = await start(with_logprobs)
    ids = {"return_tokens_as_token_ids": True}
    made = await front.openai.completions.create(model="demo", prompt="a", logprobs=1, stream=stream, extra_body=ids)
    logprobs = (await anext(made) if stream else made).choices[0].logprobs
    assert logprobs.tokens == ["token_id:7"] and set(logprobs.top_logprobs[0]) == {"token_id:7", "token_id:8"}
    assert logprobs.text_offset == [0]
    made = await front.openai.chat.completions.create(
        model="demo", messages=HI, logprobs=True, top_logprobs=2, stream=stream, extra_body=ids
    )
    chunks = [chunk async for chunk in made] if stream else [made]
    (entry,) = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert entry.token == "token_id:7" and [top.token for top in entry.top_logprobs] == ["token_id:7", "token_id:8"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_repeats_the_message_that_is_continued(start, stream):
    front = await start(lambda request: text(" there"))
    begun = [*HI, {"role": "assistant", "content": "Hello"}]
    for messages, content in ((begun, "Hello there"), (HI, " there")):
        made = await front.openai.chat.completions.create(
            model="demo", messages=messages, stream=stream, extra_body={"echo": True}
        )
        parts = [chunk.choices[0].delta async for chunk in made] if stream else [made.choices[0].message]
        assert "".join(part.content or "" for part in parts) == content


# -- functions, before there were tools ----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_are_called_as_before_tools(start, stream):
    front = await start(lambda request: text(*CALL))
    front.client.info["tool_format"] = "hermes"
    options: Any = {"model": "demo", "messages": HI, "functions": [WEATHER], "stream": stream}
    made = await front.openai.chat.completions.create(**options)
    if stream:
        chunks = [chunk.choices[0] async for chunk in made]
        calls = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
        name, arguments = calls[0].name, "".join(call.arguments or "" for call in calls)
        assert not any(chunk.delta.tool_calls for chunk in chunks)
        reason = chunks[-1].finish_reason
    else:
        message = made.choices[0].message
        assert message.tool_calls is None and message.content is None
        name, arguments = message.function_call.name, message.function_call.arguments
        reason = made.choices[0].finish_reason
    assert (name, json.loads(arguments), reason) == ("weather", {"city": "Oslo"}, "function_call")
    assert chat_of(front)["tools"] == [{"type": "function", "function": WEATHER}]
    assert json.loads(front.client.requests[-1].sampling["structured_outputs"]["structural_tag"])["format"][
        "stop_after_first"
    ], "one call at most"


@pytest.mark.parametrize(
    ("choice", "kind"), [("auto", "triggered_tags"), ("none", None), ({"name": "weather"}, "tags_with_separator")]
)
async def test_a_function_call_is_a_tool_choice(start, choice, kind):
    front = await start(ok)
    front.client.info["tool_format"] = "hermes"
    body = {"messages": HI, "functions": [WEATHER], "function_call": choice}
    assert (await front.post(CHAT, body)).status_code == 200
    request = front.client.requests[-1]
    assert ("tools" in request.chat) == (kind is not None)
    if kind:
        assert json.loads(request.sampling["structured_outputs"]["structural_tag"])["format"]["type"] == kind


async def test_a_conversation_with_functions_goes_on(start):
    front = await start(lambda request: text("5 degrees"))
    front.client.info["tool_format"] = "hermes"
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    answer = {"role": "assistant", "content": None, "function_call": call}
    messages = [*HI, answer, {"role": "function", "name": "weather", "content": "5"}]
    response = await front.post(CHAT, {"messages": messages, "functions": [WEATHER]})
    assert ChatCompletion.model_validate(response.json()).choices[0].message.content == "5 degrees"
    sent = front.client.requests[0].messages
    assert sent[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert sent[2] == {
        "role": "tool",
        "tool_call_id": sent[1]["tool_calls"][0]["id"],
        "name": "weather",
        "content": "5",
    }
    alone = [*HI, {"role": "function", "name": "weather", "content": "5"}]
    assert (await front.post(CHAT, {"messages": alone})).status_code == 200


async def test_other_roles_reach_the_template_with_a_warning(start):
    front = await start(ok)
    messages = [{"role": "pirate", "content": "Arr"}, *HI]
    response = await front.post(CHAT, {"messages": messages})
    assert response.status_code == 200 and front.client.requests[0].messages == messages
    assert "the role 'pirate' has an effect only if" in response.headers["x-inflight-warning"]
    for role in ("", "x" * 65, "<|im_start|>", 5, None, ["user"]):
        refused = await front.post(CHAT, {"messages": [{"role": role, "content": "x"}]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"


# -- responses -------------------------------------------------------------------------------------------


async def test_a_response_that_asks_to_be_stored_is_not(start):
    front = await start(ok)
    made = await front.openai.responses.with_raw_response.create(model="demo", input="a", store=True, truncation="auto")
    assert "store has no effect: nothing is stored" in made.headers["x-inflight-warning"]
    assert "truncation: 'auto' has no effect" in made.headers["x-inflight-warning"]
    assert made.parse().store is False and made.parse().truncation == "disabled"


async def test_hosted_tools_are_left_out(start):
    front = await start(ScriptedClient(lambda request: text("a")))
    front.client.info["tool_format"] = "hermes"
    hosted: list[Any] = [{"type": "web_search_preview_2025_03_11"}, {"type": "mcp", "server_label": "x"}]
    function: Any = {"type": "function", **WEATHER}
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}, function]}
    for options in ({}, {"tool_choice": choice}):
        made = await front.openai.responses.with_raw_response.create(
            model="demo", input="a", tools=[*hosted, function], **options
        )
        warning = made.headers["x-inflight-warning"]
        assert "tools of type 'mcp' have no effect" in warning and "'web_search_preview_2025_03_11'" in warning
        assert [tool.name for tool in made.parse().tools] == ["weather"]
        assert [tool["function"]["name"] for tool in chat_of(front)["tools"]] == ["weather"]
    only = await front.post("/v1/responses", {"input": "a", "tools": hosted})
    assert only.status_code == 200 and "tools" not in chat_of(front)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize(("found", "shown"), [("END", "END"), (5, 5), (2, None), (None, None)])
async def test_a_choice_says_what_ended_it(start, path, stream, found, shown):
    def answer(request: Any) -> list[StreamChunk]:
        *chunks, last = text("Hel", "lo")
        delta = replace(last.choices[0], stop_reason=found if request.return_stop_reason else None)
        return [*chunks, replace(last, choices=[delta])]

    front = await start(answer)
    front.client.inputs["demo"] += ("return_stop_reason",)
    asked = {**BODIES[path], "stream": stream}
    if found is not None:
        asked |= {"stop": ["END"], "stop_token_ids": [5]}
    response = await front.post(path, asked)
    assert response.status_code == 200
    parts = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    *before, last = [json.loads(part)["choices"][0] for part in parts or [response.text]]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", shown)
    assert not any("stop_reason" in choice for choice in before)
    assert front.client.requests[0].return_stop_reason == (found is not None)


async def test_a_backend_without_stop_reasons_is_not_asked_for_them(start):
    front = await start(ok)
    response = await front.post(CHAT, {"messages": HI, "stop": ["END"]})
    assert response.json()["choices"][0]["stop_reason"] is None and not front.client.requests[0].return_stop_reason


@pytest.mark.parametrize("path", sorted(ALL))
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("repetition_detection", {"max_pattern_size": 4}),
        ("session_id", "s"),
        ("stream_interval", 4),
        ("thinking_token_budget", 100),
    ],
)
async def test_vllms_hints_are_no_unknown_keys(start, path, key, value):
    front = await start(ok, strict=True)
    response = await front.post(path, {**ALL[path], key: value})
    assert response.status_code == 200 and response.headers["x-inflight-warning"].startswith(f"{key} has no effect: ")


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize(
    ("key", "default", "other"),
    [
        ("logprob_token_ids", [], [5]),
        ("spaces_between_special_tokens", True, False),
        ("truncation_side", "left", "right"),
    ],
)
async def test_what_would_change_the_answer_is_refused(start, path, key, default, other):
    front = await start(ok, strict=True)
    response = await front.post(path, {**BODIES[path], key: default})
    assert response.status_code == 200 and "x-inflight-warning" not in response.headers
    error = (await front.post(path, {**BODIES[path], key: other})).json()["error"]
    assert (error["param"], error["code"]) == (key, "unsupported_parameter")
