"""`/v1/chat/completions` against a scripted client, through OpenAI's own library."""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from chat_templates import TEMPLATES
from openai.types.chat import completion_create_params
from pydantic import BaseModel
from scripted_client import ScriptedClient, text

from inflight_client import ChoiceDelta, Logprob, StreamChunk
from inflight_gateway.chat_plan import ChatBody

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "w", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINK = {"reasoning_tags": ["<think>", "</think>"], "reasoning_opened": False}
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def scripted(*parts: str, **info: Any) -> ScriptedClient:
    client = ScriptedClient(lambda request: text(*parts))
    client.info.update(info)
    return client


def sampling(client: ScriptedClient) -> dict[str, Any]:
    return client.requests[-1].sampling


async def test_an_answer_has_openais_form(start):
    front = await start(scripted("Hel", "lo"))
    answer = await front.openai.chat.completions.create(model="demo", messages=HI, temperature=0.5, user="me")
    message = answer.choices[0].message
    assert (message.role, message.content, message.tool_calls) == ("assistant", "Hello", None)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.total_tokens == 5
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.system_fingerprint
    assert front.client.requests[0].messages == HI and front.client.requests[0].tenant == "me"
    assert sampling(front.client) == {"temperature": 0.5, "max_tokens": 2048}, "what the context leaves"


async def test_a_stream_has_openais_form(start):
    front = await start(scripted("Hel", "lo"))
    stream = await front.openai.chat.completions.create(
        model="demo", messages=HI, stream=True, stream_options={"include_usage": True}, max_tokens=3
    )
    chunks = [chunk async for chunk in stream]
    assert [c.choices[0].delta.role for c in chunks[:-1]] == ["assistant", None, None, None]
    assert [c.choices[0].delta.content for c in chunks[:-1]] == ["", "Hel", "lo", None]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None, None, None, "stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 5
    assert len({c.id for c in chunks}) == 1 and {c.object for c in chunks} == {"chat.completion.chunk"}
    assert sampling(front.client)["max_tokens"] == 3


def test_every_key_of_openais_request_is_known() -> None:
    known = {*ChatBody.__struct_fields__, *ChatBody.UNSUPPORTED, *ChatBody.IGNORED, *ChatBody.TRANSLATED}
    asked = typing.get_type_hints(completion_create_params.CompletionCreateParamsStreaming)
    assert set(asked) <= known


async def test_what_is_wrong_is_named(start):
    front = await start(scripted("x", tool_format="hermes"))
    for change, message in [
        ({"messages": []}, "messages: a list of objects"),
        ({"messages": [{"role": "{x}", "content": "x"}]}, r"messages\[0\].role: '{x}' came; a role such as system"),
        ({"messages": [*HI, {"role": "user"}]}, r"messages\[1\].content: a string or a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            r"messages\[0\].content\[1\]: parts of type 'image_url' are not supported",
        ),
        ({"messages": [{"role": "tool", "content": "5"}]}, r"messages\[0\].tool_call_id"),
        ({"audio": {"voice": "x"}}, "audio is not supported"),
        ({"functions": [{"name": "f"}], "tools": TOOLS}, "functions: give it or tools"),
        ({"function_call": {"name": "f"}, "tools": TOOLS}, "function_call: there are no functions"),
        ({"functions": {"name": "f"}}, "functions: a list of objects"),
        ({"functions": [{"name": "f"}], "function_call": "always"}, "function_call: auto, none"),
        ({"modalities": ["text", "audio"]}, "modalities is not supported"),
        ({"best_of": 2}, "best_of: 2 came; only n, which is 1, is supported"),
        ({"top_logprobs": 2}, "logprobs must be true"),
        ({"tool_choice": "required"}, "tool_choice: there are no tools"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]: type 'web_search' is not supported"),
        ({"tools": TOOLS + TOOLS}, r"tools\[2\]: there is another tool with the name 'weather'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool has the name 'x'"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice: 'some' came; auto, none, required"),
        ({"response_format": {"type": "xml"}}, "response_format: type 'xml' came; one of text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema: a JSON Schema"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "give it or response_format",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options are for requests with stream"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "excludes add_generation_prompt"),
        ({"n": 0}, "n: 0 came"),
    ]:
        response = await front.post("/v1/chat/completions", {"model": "demo", "messages": HI, **change})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        with pytest.raises(ValueError, match=message):
            raise ValueError(error["message"])
        assert error["param"] in (*change, "tool_choice") and not front.client.requests


async def test_messages_reach_the_template_in_its_form(start):
    front = await start(scripted("ok"))
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "Hi", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]},
        {"role": "assistant", "content": "So", "reasoning": "hm"},
    ]
    await front.openai.chat.completions.create(
        model="demo",
        messages=messages,
        reasoning_effort="low",
        extra_body={
            "continue_final_message": True,
            "add_generation_prompt": False,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    request: Any = front.client.requests[0]
    calls = [
        {**call, "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
        {**broken, "function": {"name": "weather", "arguments": '{"city": '}},
    ]
    assert request.messages == [
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "Hi", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "assistant", "content": "So", "reasoning": "hm"},
    ]
    assert request.chat == {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False},
    }


def joined(chunks: Sequence[Any]) -> dict[str, Any]:
    """The first choice of a stream, as a client joins its deltas."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            assert getattr(choice.delta, "reasoning", None) == getattr(choice.delta, "reasoning_content", None)
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(found["calls"]) and call.type == "function"
                    found["calls"].append([call.function.name, ""])
                found["calls"][call.index][1] += call.function.arguments
            found["reason"] = choice.finish_reason or found["reason"]
    return found


@pytest.mark.parametrize(
    ("answer", "finish", "expected"),
    [
        ("It is 5.", "stop", ("It is 5.", "", [], "stop")),
        (CALL, "stop", ("", "", [["weather", '{"city": "Oslo"}']], "tool_calls")),
        (
            "<think>\nHm.\n</think>\n\nLook.\n" + CALL,
            "stop",
            ("Look.", "Hm.", [["weather", '{"city": "Oslo"}']], "tool_calls"),
        ),
        (CALL[: CALL.index('"}') + 1], "length", ("", "", [["weather", '{"city": "Oslo"']], "length")),
        ("Look.\n<tool", "length", ("Look.", "", [], "length")),
        (CALL + "\n<", "length", ("", "", [["weather", '{"city": "Oslo"}']], "length")),
        ("a <", "stop", ("a <", "", [], "stop")),
        ("<think>endless", "length", ("", "endless", [], "length")),
        ("a <think> b </think>", "stop", ("a <think> b </think>", "", [], "stop")),
    ],
)
async def test_streams_and_whole_answers_agree(start, answer, finish, expected):
    client = ScriptedClient(
        lambda request: text(*answer, finish=finish) if request.stream else text(answer, finish=finish)
    )
    client.info.update(tool_format="hermes", **THINK)
    front = await start(client)
    create = front.openai.chat.completions.create
    whole = await create(model="demo", messages=HI, tools=TOOLS)
    message = whole.choices[0].message
    assert (
        message.content or "",
        getattr(message, "reasoning_content", None) or "",
        [[call.function.name, call.function.arguments] for call in message.tool_calls or []],
        whole.choices[0].finish_reason,
    ) == expected
    found = joined([chunk async for chunk in await create(model="demo", messages=HI, tools=TOOLS, stream=True)])
    assert (found["content"], found["reasoning"], found["calls"], found["reason"]) == expected
    assert front.client.requests[0].chat["tools"] == TOOLS and "structured_outputs" not in sampling(front.client)


@pytest.mark.parametrize("format", sorted({*TEMPLATES, "mistral_args"}))
async def test_a_round_trip_with_tools(start, format):
    """A call, its answer, and the end, as an agent makes them; every format that templates ask for."""
    written = {
        "hermes": CALL,
        "llama3": '{"name": "weather", "parameters": {"city": "Oslo"}}',
        "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]',
        "mistral_args": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
        "pythonic": '[weather(city="Oslo")]',
        "qwen3_coder": "<tool_call><function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function></tool_call>",
    }[format]
    client = ScriptedClient(lambda request: text("5 degrees" if len(request.messages or []) > 1 else written))
    client.info.update(tool_format=format, special_tokens={"[TOOL_CALLS]": 5, "<|python_tag|>": 6})
    front = await start(client)
    first = await front.openai.chat.completions.create(model="demo", messages=HI, tools=TOOLS)
    message = first.choices[0].message
    assert message.content is None and first.choices[0].finish_reason == "tool_calls"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    shown = sampling(client).get("skip_special_tokens")
    assert shown is (False if format in ("mistral", "mistral_args", "llama3") else None)
    answered = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
    history: Any = [*HI, message, answered]
    second = await front.openai.chat.completions.create(model="demo", messages=history, tools=TOOLS)
    assert second.choices[0].message.content == "5 degrees"
    sent: Any = client.requests[-1].messages
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


async def test_what_must_be_called_is_constrained(start):
    for options, begins, tools in [
        ({"tool_choice": "none"}, None, None),
        ({"tool_choice": "auto"}, None, TOOLS),
        ({"tool_choice": "required"}, "tags_with_separator", TOOLS),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "tags_with_separator", TOOLS),
        ({"parallel_tool_calls": False}, "triggered_tags", TOOLS),
        ({"response_format": {"type": "json_object"}}, "or", TOOLS),
        ({"response_format": {"type": "json_object"}, "tool_choice": "required"}, "tags_with_separator", TOOLS),
    ]:
        front = await start(scripted("x", tool_format="hermes"))
        await front.openai.chat.completions.create(model="demo", messages=HI, tools=TOOLS, **options)
        request: Any = front.client.requests[0]
        assert request.chat.get("tools") == tools
        constraint = request.sampling.get("structured_outputs")
        assert (constraint is None) == (begins is None)
        if begins:
            tag = json.loads(constraint["structural_tag"])["format"]
            assert tag["type"] == begins
            if options.get("tool_choice") == "required":
                assert "Oslo" not in json.dumps(tag) and json.dumps(WEATHER) in json.dumps(tag)
            if begins == "tags_with_separator":
                assert len(tag["tags"]) == (2 if options["tool_choice"] == "required" else 1)


async def test_strict_tools_are_constrained_and_others_are_not(start):
    front = await start(scripted("x", tool_format="hermes"))
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    await front.openai.chat.completions.create(model="demo", messages=HI, tools=strict)
    tags = json.loads(sampling(front.client)["structured_outputs"]["structural_tag"])["format"]["tags"]
    assert [tag["content"]["json_schema"] for tag in tags] == [WEATHER, {"type": "object"}]


async def test_a_parser_that_the_operator_chooses(start):
    chosen = await start(scripted(CALL), tool_call_parser="hermes")
    response = await chosen.post("/v1/chat/completions", {"messages": HI, "tools": TOOLS})
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert chosen.client.requests[0].chat["tools"] == TOOLS, "the template knows tools"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_that_is_cut_before_its_name_is_no_content(start, stream):
    answer = '{"name": "wea'
    front = await start(ScriptedClient(lambda request: text(*answer, finish="length")))
    front.client.info["tool_format"] = "llama3"
    options: Any = {"model": "demo", "messages": HI, "tools": TOOLS, "stream": stream}
    for choice, content in (("required", ""), ("auto", answer)):
        made = await front.openai.chat.completions.create(**options, tool_choice=choice)
        shown = joined([chunk async for chunk in made])["content"] if stream else made.choices[0].message.content or ""
        assert shown == content


class Person(BaseModel):
    name: str
    age: int


async def test_parse_with_pydantic(start):
    front = await start(scripted('{"name": "Al", ', '"age": 5}', tool_format="hermes"))
    parsed = await front.openai.chat.completions.parse(model="demo", messages=HI, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(name="Al", age=5)
    assert sampling(front.client)["structured_outputs"]["json"]["required"] == ["name", "age"]
    async with front.openai.chat.completions.stream(model="demo", messages=HI, response_format=Person) as stream:
        kinds = [event.type async for event in stream]
    assert (await stream.get_final_completion()).choices[0].message.parsed == Person(name="Al", age=5)
    assert "content.delta" in kinds and kinds[-1] == "content.done"


async def test_parse_of_calls_with_pydantic(start):
    front = await start(
        scripted('<tool_call>{"name": "Person", "arguments": {"name": "Al", "age": 5}}', tool_format="hermes")
    )
    tools = [openai.pydantic_function_tool(Person)]
    async with front.openai.chat.completions.stream(model="demo", messages=HI, tools=tools) as stream:
        kinds = [event.type async for event in stream]
    found = (await stream.get_final_completion()).choices[0].message.tool_calls[0]
    assert found.function.parsed_arguments == Person(name="Al", age=5)
    assert "tool_calls.function.arguments.done" in kinds
    parsed = await front.openai.chat.completions.parse(model="demo", messages=HI, tools=tools)
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == Person(name="Al", age=5)


def with_logprobs(held: bool) -> list[StreamChunk]:
    rows = [{7: Logprob(-0.5, 1, "é"), 8: Logprob(-1.5, 2, "b")}, {9: Logprob(-3.0, 5, "!"), 8: Logprob(-1.0, 1, "b")}]
    texts = ["", "é!"] if held else ["é", "!"]
    deltas = [
        ChoiceDelta(0, shown, [token], 1, None if token == 7 else "stop", [row])
        for shown, token, row in zip(texts, (7, 9), rows)
    ]
    return [StreamChunk([delta], 3) for delta in deltas]


@pytest.mark.parametrize("held", [False, True])
async def test_log_probabilities(start, held):
    front = await start(ScriptedClient(lambda request: with_logprobs(held)))
    options: Any = dict(model="demo", messages=HI, logprobs=True, top_logprobs=1, extra_body={"return_token_ids": True})
    whole = (await front.openai.chat.completions.create(**options)).choices[0]
    entries = whole.logprobs.content
    assert [(entry.token, entry.logprob, entry.bytes) for entry in entries] == [
        ("é", -0.5, [195, 169]),
        ("!", -3.0, [33]),
    ]
    assert [[top.token for top in entry.top_logprobs] for entry in entries] == [["é"], ["b"]]
    stream = await front.openai.chat.completions.create(**options, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content] == entries
    assert [token for chunk in chunks for token in getattr(chunk, "token_ids", None) or []] == [7, 9] == whole.token_ids
    assert sampling(front.client)["logprobs"] == 1
    await front.openai.chat.completions.create(model="demo", messages=HI, logprobs=True)
    assert sampling(front.client)["logprobs"] == 0


async def test_several_choices(start):
    chunks = [*text("a", "b", index=0, n=2), *text("c", index=1, n=2, finish="length")]
    front = await start(lambda request: chunks)
    options: Any = dict(model="demo", messages=HI, n=2, seed=1, stop=["x"], logit_bias={"5": -3}, presence_penalty=1)
    answer = await front.openai.chat.completions.create(**options)
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "ab", "stop"),
        (1, "c", "length"),
    ]
    assert sampling(front.client) == {
        "n": 2,
        "seed": 1,
        "stop": ["x"],
        "logit_bias": {"5": -3.0},
        "presence_penalty": 1.0,
        "max_tokens": 2048,
    }
    stream = await front.openai.chat.completions.create(**options, stream=True)
    deltas = [(c.choices[0].index, c.choices[0].delta.content, c.choices[0].finish_reason) async for c in stream]
    assert sorted(deltas, key=lambda one: one[0]) == [
        *((0, "", None), (0, "a", None), (0, "b", None), (0, None, "stop")),
        *((1, "", None), (1, "c", None), (1, None, "length")),
    ]


async def test_usage_in_every_chunk(start):
    front = await start(scripted("a", "b"))
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await front.openai.chat.completions.create(model="demo", messages=HI, stream=True, stream_options=options)
    assert [chunk.usage.completion_tokens async for chunk in stream] == [0, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("info", "extra", "answer", "reasoning", "content"),
    [
        ({"reasoning_opened": True}, {}, "hm</think>5", "hm", "5"),
        ({"reasoning_opened": True}, {}, "<think>hm</think>5", "hm", "5"),
        ({"reasoning_opened": True}, {"chat_template_kwargs": {"thinking": False}}, "5", None, "5"),
        ({}, {"chat_template_kwargs": {"thinking": True}}, "hm</think>5", "hm", "5"),
        ({"reasoning_opened": True}, {"include_reasoning": False}, "hm</think>5", None, "5"),
        ({"reasoning_opened": True}, {"continue_final_message": True}, "hm</think>5", None, "hm</think>5"),
        ({"reasoning_tags": None}, {}, "<think>hm</think>5", None, "<think>hm</think>5"),
    ],
)
async def test_reasoning(start, info, extra, answer, reasoning, content):
    class Client(ScriptedClient):
        """Its template opens the tag if thinking is true."""

        async def tokenize(self, prompt: str | None = None, *, model: str, **options: Any) -> dict[str, Any]:
            opened = options["chat_template_kwargs"]["thinking"]
            self.questions.append(options)
            return {"tokens": list(map(ord, "Hi\n<think>\n" if opened else "Hi\n<think></think>\n"))}

    client = Client(lambda request: text(answer))
    client.info.update({**THINK, **info})
    front = await start(client)
    for _ in range(2):
        whole = await front.openai.chat.completions.create(model="demo", messages=HI, extra_body=extra)
        message = whole.choices[0].message
        assert (getattr(message, "reasoning_content", None), message.content) == (reasoning, content)
        assert getattr(message, "reasoning", None) == reasoning
    assert len(client.questions) == ("chat_template_kwargs" in extra), "asked once"


async def test_an_error_in_the_middle_of_a_call_ends_the_stream(start):
    parts = text(CALL[:60], finish=None)
    client = ScriptedClient(lambda request: [*parts, openai.OpenAIError("boom")])
    client.info["tool_format"] = "hermes"
    front = await start(client)
    response = await front.post("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "stream": True})
    events = response.text.strip().split("\n\n")
    assert "weather" in response.text and "error" in events[-2] and events[-1] == "data: [DONE]"


async def test_a_backend_without_chat_templates(start):
    client = scripted("x")
    client.inputs["other"] = ("text_input", "stream", "sampling_parameters")
    front = await start(client)
    response = await front.post("/v1/chat/completions", {"model": "other", "messages": HI})
    assert response.status_code == 400 and "use /v1/completions" in response.json()["error"]["message"]
