"""`/v1/messages` and `/v1/messages/count_tokens` against a scripted client."""

from __future__ import annotations

import asyncio
import datetime
import json
from typing import Any

import pytest
from scripted_client import ScriptedClient, text

from inflight_client import ChoiceDelta, StreamChunk, UnavailableError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"name": "weather", "description": "Of a city", "input_schema": SCHEMA}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HI: dict[str, Any] = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
THINKING = {"type": "enabled", "budget_tokens": 1024}


def scripted(answer: str, finish: str = "stop") -> ScriptedClient:
    client = ScriptedClient(lambda request: text(*((answer if request.stream else "") or [answer]), finish=finish))
    client.info.update(tool_format="hermes", reasoning_tags=["<think>", "</think>"], reasoning_opened=False)
    return client


def events_of(stream: str) -> list[dict[str, Any]]:
    events = []
    for raw in stream.strip().split("\n\n"):
        name, _, data = raw.partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from the events of a stream."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    open_block = None
    for event in events[2:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            open_block, written = event["content_block"], ""
            continue
        assert open_block is not None and event["index"] == len(message["content"]) - 1
        if kind == "content_block_stop":
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(written) if written else {}
            open_block = None
        else:
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                written += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                open_block[key] += delta[key]
    assert open_block is None
    return {**message, **events[-2]["delta"], "usage": message["usage"] | events[-2]["usage"]}


async def test_a_message_has_anthropics_form(start):
    front = await start(scripted("Hello"))
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "stop_sequences": ["x"], "metadata": {"user_id": "u"}}
    system = [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}]
    body = {**HI, **options, "system": system, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    answer = await front.post("/v1/messages?beta=true", body, headers={"anthropic-version": "2023-06-01"})
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "x-inflight-warning" not in answer.headers
    assert answer.json() == {
        "id": f"msg_{answer.headers['request-id']}",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 1,
        },
    }
    request = front.client.requests[0]
    assert request.messages == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    assert request.sampling == {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "stop": ["x"]}
    assert request.tenant == "u"


ANSWERS: list[tuple[str, str, list[str], str]] = [
    ("Hi there", "stop", ["text"], "end_turn"),
    ("Hi there", "length", ["text"], "max_tokens"),
    ("<think>Hm.</think>Hi", "stop", ["thinking", "text"], "end_turn"),
    ("<think>Hm.</think>Look.\n" + CALL + "\n" + CALL, "stop", ["thinking", "text", *["tool_use"] * 2], "tool_use"),
    (CALL, "stop", ["tool_use"], "tool_use"),
    ("", "stop", ["text"], "end_turn"),
    ("<think>endless", "length", ["thinking"], "max_tokens"),
]


@pytest.mark.parametrize(("answer", "finish", "kinds", "reason"), ANSWERS)
async def test_events_tell_the_whole_message(start, answer, finish, kinds, reason):
    front = await start(scripted(answer, finish))
    body = {**HI, "tools": TOOLS, "thinking": THINKING}
    whole = (await front.post("/v1/messages", body)).json()
    streamed = await front.post("/v1/messages", {**body, "stream": True})
    assert streamed.headers["request-id"] == streamed.headers["x-request-id"]
    message = message_of(events_of(streamed.text))
    assert [block["type"] for block in whole["content"]] == kinds and whole["stop_reason"] == reason
    for one in (whole, message):
        del one["id"], one["usage"]
        for block in one["content"]:
            block.pop("id", None)
    assert message == whole
    if "tool_use" in kinds:
        assert whole["content"][-1] == {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}


async def test_a_call_that_is_cut_off_has_no_input(start):
    front = await start(scripted(CALL[:-20], "length"))
    answer = (await front.post("/v1/messages", {**HI, "tools": TOOLS})).json()
    assert answer["stop_reason"] == "max_tokens" and answer["content"][0]["input"] == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_that_ended_a_message_is_named(start, stream):
    ended = ChoiceDelta(0, "a", [7], 1, "stop", stop_reason="END")
    front = await start(ScriptedClient(lambda request: [StreamChunk([ended], 8, 5)]))
    front.client.inputs["demo"] += ("return_stop_reason",)
    raw = await front.post("/v1/messages", {**HI, "stop_sequences": ["END"], "stream": stream})
    answer = message_of(events_of(raw.text)) if stream else raw.json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    assert (answer["usage"]["input_tokens"], answer["usage"]["cache_read_input_tokens"]) == (3, 5)
    assert front.client.requests[0].return_stop_reason


async def test_a_backend_without_stop_reasons_is_not_asked_for_them(start):
    front = await start(scripted("a"))
    answer = (await front.post("/v1/messages", {**HI, "stop_sequences": ["END"]})).json()
    assert answer["stop_reason"] == "end_turn" and not front.client.requests[0].return_stop_reason


async def test_a_round_trip_with_tools_and_thinking(start):
    front = await start(scripted("<think>Hm.</think>" + CALL))
    body = {**HI, "tools": TOOLS, "thinking": THINKING}
    content = (await front.post("/v1/messages", body)).json()["content"]
    call_id = content[-1]["id"]
    result = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": "5"}]}
    history = [
        *HI["messages"],
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    await front.post("/v1/messages", {**body, "messages": history})
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert front.client.requests[1].messages == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": call_id, "content": "5"},
        {"role": "user", "content": "And?"},
    ]
    described = {"name": "weather", "description": "Of a city", "parameters": SCHEMA}
    assert front.client.requests[1].chat["tools"] == [{"type": "function", "function": described}]


@pytest.mark.parametrize(
    ("choice", "constrained", "described"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, True, True),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "weather"}, True, True),
        ({"type": "none"}, False, False),
    ],
)
async def test_tool_choice(start, choice, constrained, described):
    front = await start(scripted(CALL))
    await front.post("/v1/messages", {**HI, "tools": TOOLS, "tool_choice": choice})
    request = front.client.requests[0]
    assert ("structured_outputs" in request.sampling) is constrained and ("tools" in request.chat) is described


@pytest.mark.parametrize(
    ("thinking", "switched", "shown"),
    [
        (None, False, False),
        ({"type": "disabled"}, False, False),
        (THINKING, True, True),
        ({"type": "adaptive"}, None, True),
        ({"type": "adaptive", "display": "omitted"}, None, False),
    ],
)
async def test_thinking_turns_reasoning_on_and_off(start, thinking, switched, shown):
    front = await start(scripted("<think>Hm.</think>Hi"))
    answer = await front.post("/v1/messages", {**HI, "thinking": thinking})
    kinds = [block["type"] for block in answer.json()["content"]]
    assert kinds == (["thinking", "text"] if shown else ["text"])
    options = front.client.requests[0].chat.get("chat_template_kwargs", {})
    assert options.get("enable_thinking") == options.get("thinking") == switched
    assert ("budget_tokens" in answer.headers.get("x-inflight-warning", "")) is (thinking is THINKING)


async def test_what_claude_code_sends(start):
    """Blocks with cache_control, a billing block that differs each time, system messages in the conversation, hosted
    tools, and options of betas."""
    front = await start(scripted("Hi"))
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        **HI,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.0df; cch=1;"},
            {"type": "text", "text": "You are an agent.", **cached},
            {"type": "text", "text": "Help.", **cached},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "hi", **cached}]},
            {"role": "system", "content": "Agents: none."},
        ],
        "tools": [{**TOOLS[0], **cached}, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": '{"session_id":"1"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    headers = {"anthropic-beta": "claude-code-20250219,effort-2025-11-24", "x-app": "cli"}
    answer = await front.post("/v1/messages?beta=true", body, headers=headers)
    assert message_of(events_of(answer.text))["content"] == [{"type": "text", "text": "Hi"}]
    warning = answer.headers["x-inflight-warning"]
    assert "context_management has no effect" in warning and "'web_search_20250305' have no effect" in warning
    request = front.client.requests[0]
    assert request.messages == [
        {"role": "system", "content": "You are an agent.\nHelp."},
        {"role": "user", "content": "a\nhi\n<system>\nAgents: none.\n</system>"},
    ]
    assert [tool["function"]["name"] for tool in request.chat["tools"]] == ["weather"]
    assert request.chat["chat_template_kwargs"] == {"reasoning_effort": "high"}


async def test_the_last_message_of_the_assistant_is_continued(start):
    front = await start(scripted(" Oslo"))
    history = [*HI["messages"], {"role": "assistant", "content": "It is"}]
    answer = await front.post("/v1/messages", {**HI, "messages": history})
    assert answer.json()["content"] == [{"type": "text", "text": " Oslo"}]
    chat = front.client.requests[0].chat
    assert chat["continue_final_message"] is True and chat["add_generation_prompt"] is False
    await front.post("/v1/messages", {**HI, "messages": [*HI["messages"], {"role": "assistant", "content": []}]})
    assert front.client.requests[1].messages == HI["messages"], "there is nothing to continue"
    assert "continue_final_message" not in front.client.requests[1].chat


async def test_very_many_blocks_become_one_text(start):
    """Each once.  How long that takes is not tested: joined one by one, they would be copied again and again."""
    front = await start(scripted("a"))
    blocks = [{"type": "text", "text": "a" * 60}] * 50_000
    thoughts = [{"type": "thinking", "thinking": "a" * 20, "signature": ""}] * 20_000
    history = [{"role": "user", "content": blocks}, {"role": "assistant", "content": thoughts}, *HI["messages"]]
    await front.post("/v1/messages", {**HI, "messages": history})
    first, second, _ = front.client.requests[0].messages
    assert first["content"].count("\n") == 49_999 and second["reasoning_content"].count("\n") == 19_999


async def test_output_config_constrains_the_text(start):
    front = await start(scripted("{}"))
    format = {"type": "json_schema", "schema": SCHEMA}
    await front.post("/v1/messages", {**HI, "output_config": {"format": format}})
    assert '"city"' in json.dumps(front.client.requests[0].sampling["structured_outputs"]).replace('\\"', '"')


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: 0 came"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"messages": []}, "messages: a list of objects"),
    ({"messages": "Hi"}, "messages: a list of objects"),
    ({"messages": [{"role": "tool", "content": "a"}]}, r"messages\[0\]: an object with content and the role"),
    ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content: at least one block"),
    ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content: a string or a list of blocks"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"messages\[0\].content\[0\]: blocks of type 'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "content.0..text: a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "9"}]}]},
        r"messages\[0\].content\[0\].tool_use_id: '9' is not the id of a tool_use block",
    ),
    (
        {
            "messages": [
                *HI["messages"],
                CALLED,
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]},
            ]
        },
        r"messages\[2\].content\[0\].content\[0\]: parts of type 'image'",
    ),
    ({"messages": [{"role": "assistant", "content": ""}]}, "messages: a message with text"),
    ({"messages": [*HI["messages"], CALLED]}, r"messages\[1\]: the results of its tool_use blocks"),
    ({"system": [IMAGE]}, r"system\[0\]: parts of type 'image'"),
    ({"system": {"a": 1}}, "system: a string or a list"),
    ({"tools": "x"}, "tools: a list"),
    ({"tools": [{"name": "f"}]}, r"tools\[0\]: a tool such as"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice: "),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "no tool has the name 'g'"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"thinking": True}, "thinking: an object"),
    ({"metadata": "u"}, "metadata: Expected `object"),
    ({"stop_sequences": "x"}, "stop_sequences: Expected `array"),
    ({"output_config": {"format": {"type": "xml"}}}, "response_format: type 'xml'"),
    ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers is not supported"),
    ({"container": "c"}, "container is not supported"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
async def test_what_is_wrong_is_named_in_anthropics_form(start, change, message):
    front = await start(scripted("x"))
    response = await front.post("/v1/messages", {**HI, **change})
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["request_id"] == response.headers["request-id"] and error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error" and set(error["error"]) == {"type", "message"}
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["error"]["message"])
    assert not front.client.requests


async def test_a_thread_is_refused_as_the_library_expects(start):
    front = await start(scripted("x"))
    error = (await front.post("/v1/messages", {**HI, "thread": {"type": "create"}})).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_statuses_and_types_of_errors(start):
    front = await start(lambda request: [UnavailableError("the model drains")], api_keys=("secret",))
    key = {"x-api-key": "secret"}
    for path, headers, body, status, kind in [
        ("/v1/messages", {}, HI, 401, "authentication_error"),
        ("/v1/messages", {"x-api-key": "wrong"}, HI, 401, "authentication_error"),
        ("/v1/messages/count_tokens", {}, HI, 401, "authentication_error"),
        ("/v1/messages", key, {**HI, "model": "claude-opus"}, 404, "not_found_error"),
        ("/v1/messages", key, HI, 529, "overloaded_error"),
        ("/v1/messages", {"authorization": "Bearer secret"}, HI, 529, "overloaded_error"),
    ]:
        response = await front.post(path, body, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    wrong_method = await front.http.get("/v1/messages", headers=key)
    assert wrong_method.status_code == 405 and wrong_method.json()["type"] == "error"
    others = await front.post("/v1/chat/completions", HI)
    assert set(others.json()["error"]) == {"message", "type", "param", "code"}, "OpenAI's form stays on its own paths"
    assert (await front.http.get("/v1/models", headers=key)).status_code == 200


async def test_an_error_in_the_middle_is_an_event(start):
    front = await start(lambda request: [*text("a", finish=None), UnavailableError("the queue is full")])
    response = await front.post("/v1/messages", {**HI, "stream": True})
    last = events_of(response.text)[-1]
    assert last["error"] == {"type": "rate_limit_error", "message": "the queue is full"}
    assert last["request_id"] == response.headers["request-id"]


async def test_pings_keep_a_silent_stream_alive(start):
    """Before the first token, too."""
    ready = asyncio.Event()
    front = await start(lambda request: [ready, *text("a")], keep_alive_seconds=0.01)
    received = ""
    async with front.http.stream("POST", "/v1/messages", json={**HI, "stream": True}) as response:
        async for part in response.aiter_text():
            received += part
            ready.set()
    events = events_of(received)
    start_at = [event["type"] for event in events].index("message_start")
    assert start_at > 0 and all(event == {"type": "ping"} for event in events[:start_at])
    assert message_of(events[start_at:])["content"] == [{"type": "text", "text": "a"}]


async def test_hanging_up_frees_the_request(start):
    front = await start(lambda request: [*text("a", finish=None), asyncio.Event()])
    async with front.http.stream("POST", "/v1/messages", json={**HI, "stream": True}) as response:
        async for _ in response.aiter_bytes():
            break
    await asyncio.wait_for(front.client.streams[0].cancelled.wait(), 5)


async def test_unknown_keys_are_warned_of_or_refused(start):
    lenient, strict = await start(scripted("x")), await start(scripted("x"), strict=True)
    answer = await lenient.post("/v1/messages", {**HI, "temperatur": 1})
    assert "unknown parameter 'temperatur' was ignored" in answer.headers["x-inflight-warning"]
    metrics = (await lenient.http.get("/metrics")).text
    assert 'warnings_total{endpoint="/v1/messages",reason="unknown_key"} 1.0' in metrics
    refused = await strict.post("/v1/messages", {**HI, "temperatur": 1})
    assert "did you mean 'temperature'?" in refused.json()["error"]["message"]


async def test_tokens_are_counted_as_the_prompt_is_rendered(start):
    front = await start(scripted("x"))
    front.client.tokenize = counting(front.client)
    chat = {name: HI[name] for name in ("model", "messages")}
    options = {"system": "Be brief", "tools": TOOLS, "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}}
    counted = await front.post("/v1/messages/count_tokens", {**chat, **options})
    assert counted.json() == {"input_tokens": 7} and "request-id" in counted.headers
    await front.post("/v1/messages", {**HI, **options})
    asked, request = front.client.questions[-1], front.client.requests[0]
    assert asked["messages"] == request.messages
    assert {name: asked[name] for name in request.chat} == request.chat


async def test_tokens_of_a_response_are_counted(start):
    front = await start(scripted("x"))
    front.client.tokenize = counting(front.client)
    found = await front.openai.responses.input_tokens.count(
        model="demo", input="Hi", instructions="Be brief", personality="friendly"
    )
    assert (found.input_tokens, found.object) == (7, "response.input_tokens")
    assert front.client.questions[-1]["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]
    wrong = await front.post("/v1/responses/input_tokens", {"input": "Hi", "conversation": "c"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "conversation"
    assert not front.client.requests


def counting(client: ScriptedClient) -> Any:
    """A `tokenize` that finds seven tokens in any chat."""

    async def tokenize(*, model: str, **options: Any) -> dict[str, Any]:
        client.questions.append(options)
        return {"count": 7, "max_model_len": 2048, "tokens": [1] * 7}

    return tokenize


async def test_models_have_anthropics_form_for_its_clients(start):
    front = await start(lambda request: text("Hi"))
    version = {"anthropic-version": "2023-06-01"}
    plain = (await front.http.get("/v1/models/demo")).json()
    assert plain["object"] == "model" and "display_name" not in plain
    card = (await front.http.get("/v1/models/demo", headers=version)).json()
    created = datetime.datetime.fromisoformat(card.pop("created_at").replace("Z", "+00:00"))
    assert created.timestamp() == plain["created"]
    assert card == {
        "type": "model",
        "id": "demo",
        "display_name": "demo",
        "lifecycle": "active",
        "max_input_tokens": 2048,
        "max_tokens": 2048,
    }
    listed = (await front.http.get("/v1/models?limit=20", headers=version)).json()
    assert [one["id"] for one in listed.pop("data")] == ["demo"]
    assert listed == {"has_more": False, "first_id": "demo", "last_id": "demo"}
    nothing = await start(ScriptedClient(lambda request: text("Hi"), models=()))
    listed = (await nothing.http.get("/v1/models", headers=version)).json()
    assert listed == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "kind"),
    [
        ("GET", "/v1/models", {}, 401, "authentication_error"),
        ("GET", "/v1/models/a/b", {}, 401, "authentication_error"),
        ("GET", "/v1/models/a/b", {"x-api-key": "key"}, 404, "not_found_error"),
        ("DELETE", "/v1/models", {"x-api-key": "key"}, 405, "invalid_request_error"),
    ],
)
async def test_errors_of_models_have_anthropics_form_for_its_clients(start, method, path, headers, status, kind):
    front = await start(lambda request: text("Hi"), api_keys=("key",))
    answer = await front.http.request(method, path, headers={**headers, "anthropic-version": "2023-06-01"})
    shown = answer.json()
    assert answer.status_code == status and answer.headers["request-id"] == shown["request_id"]
    assert (shown["type"], shown["error"]["type"]) == ("error", kind)
    plain = await front.http.request(method, path, headers=headers)
    assert plain.status_code == status and "code" in plain.json()["error"] and "request-id" not in plain.headers
