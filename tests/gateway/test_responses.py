"""`/v1/responses` against a scripted client, through OpenAI's own library."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent, response_create_params
from pydantic import BaseModel, TypeAdapter
from scripted_client import ScriptedClient, text

from inflight_client import ChoiceDelta, Logprob, StreamChunk, UnavailableError
from inflight_gateway import response_headers
from inflight_gateway.responses_input import ResponsesBody

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
HI = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def scripted(answer: str, finish: str = "stop") -> ScriptedClient:
    client = ScriptedClient(lambda request: text(*((answer if request.stream else "") or [answer]), finish=finish))
    client.info.update(tool_format="hermes", reasoning_tags=["<think>", "</think>"], reasoning_opened=False)
    return client


async def test_a_response_has_openais_form(start):
    front = await start(scripted("Hello"))
    answer = await front.openai.responses.create(
        model="demo", input="Hi", instructions="Be brief", max_output_tokens=5, temperature=0, store=False
    )
    assert (answer.output_text, answer.status, answer.error, answer.store) == ("Hello", "completed", None, False)
    assert answer.usage.total_tokens == 4 and answer.max_output_tokens == 5 and answer.id.startswith("resp_")
    request = front.client.requests[0]
    assert request.messages == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    assert request.sampling == {"max_tokens": 5, "temperature": 0.0}
    Response.model_validate(answer.model_dump(), strict=False)


ANSWERS = [
    ("Hi there", "stop", ["message"]),
    ("<think>Hm.</think>Hi", "stop", ["reasoning", "message"]),
    ("<think>Hm.</think>Look.\n" + CALL + "\n" + CALL, "stop", ["reasoning", "message", *["function_call"] * 2]),
    ("", "stop", ["message"]),
    (CALL[:-18], "length", ["function_call"]),
    ("<think>endless", "length", ["reasoning"]),
]


@pytest.mark.parametrize(("answer", "finish", "kinds"), ANSWERS)
async def test_events_tell_the_whole_response(start, answer, finish, kinds):
    front = await start(scripted(answer, finish))
    body = {"model": "demo", "input": "Hi", "tools": TOOLS, "tool_choice": "auto"}
    whole = (await front.post("/v1/responses", body)).json()
    raw = (await front.post("/v1/responses", {**body, "stream": True})).text.strip().split("\n\n")
    events = [json.loads(one.split("data: ", 1)[1]) for one in raw]
    for number, event in enumerate(events):
        assert event["sequence_number"] == number and raw[number].startswith(f"event: {event['type']}\n")
        EVENTS.validate_python(event)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]["response"]
    assert events[-1]["type"] == f"response.{'incomplete' if finish == 'length' else 'completed'}"
    assert [item["type"] for item in final["output"]] == kinds
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    for number, item in enumerate(done):
        grown = "".join(e["delta"] for e in events if e["type"].endswith(".delta") and e["output_index"] == number)
        assert grown == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert item["status"] == ("incomplete" if finish == "length" and number == len(done) - 1 else "completed")
    for response in (whole, final):
        Response.model_validate(response)
        for item in response["output"]:
            item["id"] = item["call_id"] = ""
    assert whole["output"] == final["output"] and whole["status"] == final["status"]
    assert final["incomplete_details"] == ({"reason": "max_output_tokens"} if finish == "length" else None)


async def test_openais_stream_helper(start):
    front = await start(scripted("Look. " + CALL))
    async with front.openai.responses.stream(model="demo", input="Hi", tools=TOOLS) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and "response.completed" in kinds
    assert final.output[1].parsed_arguments == {"city": "Oslo"} and final.output_text == "Look."


async def test_a_round_trip_with_tools(start):
    front = await start(scripted("<think>Hm.</think>" + CALL))
    first = await front.openai.responses.create(model="demo", input="Hi", tools=TOOLS)
    call = first.output[-1]
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        *(item.model_dump() for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "5"},
    ]
    await front.openai.responses.create(model="demo", input=history, tools=TOOLS)
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert front.client.requests[1].messages == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "5"},
    ]
    described = {"name": "weather", "parameters": WEATHER, "strict": True}
    assert front.client.requests[1].chat["tools"] == [{"type": "function", "function": described}]
    assert "structured_outputs" in front.client.requests[1].sampling, "a strict tool"


class Person(BaseModel):
    name: str


async def test_parse_with_pydantic(start):
    front = await start(scripted('{"name": "Al"}'))
    parsed = await front.openai.responses.parse(model="demo", input="Hi", text_format=Person)
    assert parsed.output_parsed == Person(name="Al")
    constraint = front.client.requests[0].sampling["structured_outputs"]["structural_tag"]
    assert '"name"' in constraint and "</think>" in constraint


async def test_log_probabilities(start):
    row = {7: Logprob(-0.5, 1, "a"), 8: Logprob(-1.5, 2, "b")}
    delta = ChoiceDelta(0, "a", [7], 1, "stop", [row])
    front = await start(ScriptedClient(lambda request: [StreamChunk([delta], 3)]))
    options: Any = dict(model="demo", input="Hi", include=["message.output_text.logprobs"], top_logprobs=2)
    answer = await front.openai.responses.create(**options)
    found = answer.output[0].content[0].logprobs
    assert [(one.token, len(one.top_logprobs)) for one in found] == [("a", 2)]
    stream = await front.openai.responses.create(**options, stream=True)
    deltas = [event async for event in stream if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == ["a"]


async def test_an_error_in_the_middle(start):
    front = await start(lambda request: [*text("a", finish=None), UnavailableError("the queue is full")])
    stream = await front.openai.responses.create(model="demo", input="Hi", stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert (last.response.error.code, last.response.error.message) == ("rate_limit_exceeded", "the queue is full")


def test_every_key_of_openais_request_is_known() -> None:
    kind = ResponsesBody
    known = {*kind.__struct_fields__, *kind.UNSUPPORTED, *kind.IGNORED, *kind.TRANSLATED}
    assert set(typing.get_type_hints(response_create_params.ResponseCreateParamsStreaming)) <= known


async def test_what_is_wrong_is_named(start):
    front = await start(scripted("x"))
    for change, message in [
        ({"prompt_logprobs": 2}, "prompt_logprobs: a response has no place for them"),
        ({"return_token_ids": True}, "return_token_ids: a response has no place for them"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"background": True}, "background is not supported"),
        ({"truncation": "some"}, "truncation: 'auto' or 'disabled'"),
        ({"n": 2}, "n: 2 came; a response has one answer"),
        ({"max_tokens": 2}, "max_output_tokens"),
        ({"include": "file_search_call.results"}, "include: "),
        ({"input": []}, "input: a text or a list"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]: items of type 'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            r"input\[0\].content\[0\]: parts of type 'input_image' are not supported",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, r"input\[0\].call_id"),
        ({"tools": [{"type": "oracle"}]}, r"tools\[0\]: type 'oracle' is not supported"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "no tool has the name 'x'"),
    ]:
        response = await front.post("/v1/responses", {"model": "demo", "input": "Hi", **change})
        assert response.status_code == 400, response.text
        with pytest.raises(ValueError, match=message):
            raise ValueError(response.json()["error"]["message"])


async def test_allowed_tools(start):
    front = await start(scripted(CALL))
    tools = [*TOOLS, {"type": "function", "name": "now"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    await front.openai.responses.create(model="demo", input="Hi", tools=tools, tool_choice=choice)
    request = front.client.requests[0]
    assert len(request.chat["tools"]) == 2
    constraint = request.sampling["structured_outputs"]["structural_tag"]
    assert "weather" in constraint and "now" not in constraint


async def test_what_cannot_be_included_is_warned_of(start):
    front = await start(lambda request: text("Hi"))
    included = ["web_search_call.action.sources", "message.output_text.logprobs", "reasoning.encrypted_content"]
    response = await front.post("/v1/responses", {"input": "Hi", "include": included})
    assert response.status_code == 200 and front.client.requests[0].sampling["logprobs"] == 0
    warning = response.headers["x-inflight-warning"]
    assert warning == (
        "include: 'web_search_call.action.sources' has no effect: it is of tools that are not run here, or of images"
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi", "include": [f"x{number}" for number in range(10_000)]}),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": f"mcp{number}"} for number in range(10_000)]}),
        ("/v1/messages", {**HI, "tools": [{"type": f"mcp{number}"} for number in range(10_000)]}),
        ("/v1/chat/completions", {"messages": [{"role": f"r{number}", "content": "Hi"} for number in range(10_000)]}),
    ],
    ids=["include", "tools of responses", "tools of messages", "roles"],
)
async def test_many_reasons_for_warnings_take_no_more_memory_and_calls_than_a_few(start, monkeypatch, path, body):
    front = await start(lambda request: text("Hi"))
    kept, calls, counted = [], [], front.gateway.metrics.warned
    monkeypatch.setattr(front.gateway.metrics, "warned", lambda *call: (calls.append(call), counted(*call)))
    header = response_headers._warning_header

    def seen(scope: Any) -> Any:
        kept.append(response_headers.warnings_of(scope).shown)
        return header(scope)

    monkeypatch.setattr(response_headers, "_warning_header", seen)
    response = await front.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["x-inflight-warning"].endswith("; and 9992 more")
    assert [len(messages) for messages in kept] == [8] and calls == [(path, "ignored", 10_000)]
    counter = f'inflight_gateway_warnings_total{{endpoint="{path}",reason="ignored"}} 10000.0'
    assert counter in (await front.http.get("/metrics")).text
