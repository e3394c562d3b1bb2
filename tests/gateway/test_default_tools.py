"""Tools for models whose chat template has none: they are described in a message, and calls are text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_client import ScriptedClient, text

from inflight.frontend.chat.chat_messages import ChatTemplateError
from inflight.frontend.chat.renderer import TemplateRenderer
from inflight_client import InvalidRequestError
from inflight_gateway.default_tools import with_tools

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
SILENT = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HI: list[Any] = [{"role": "user", "content": "Hi"}]
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}


class Model(ScriptedClient):
    """A model that renders a template, a token for each character, and answers with the given texts in turn."""

    def __init__(self, template: str, *answers: str, **info: Any) -> None:
        self.renderer = TemplateRenderer(template, {})
        waiting = list(answers)
        super().__init__(lambda request: text(*waiting.pop(0)))
        self.info |= {"takes_tools": False, **info}

    async def tokenize(self, prompt: str | None = None, *, model: str, **options: Any) -> dict[str, Any]:
        self.questions.append(options)
        try:
            rendered = self.renderer.render(json.dumps(options["messages"])).decode()
        except ChatTemplateError as error:
            raise InvalidRequestError(f"messages: {error}") from None
        return {"tokens": list(map(ord, rendered))}

    def prompts(self) -> list[str]:
        """The prompt of each request so far, as the template renders it."""
        chats = [{"messages": request.messages, **request.chat} for request in self.requests]
        return [self.renderer.render(json.dumps(chat)).decode() for chat in chats]


@pytest.mark.parametrize("template", [PLAIN, NO_SYSTEM + PLAIN, NO_SYSTEM + TURNS + PLAIN, SILENT])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_calls_works_with_any_template(start, template, stream):
    model = Model(template, "Let me look.\n" + CALL + "\n" + CALL.replace("Oslo", "Rome"), "5 and 20 degrees")
    front = await start(model)
    options: Any = {"model": "demo", "tools": [WEATHER], "stream": stream}
    made = await front.openai.chat.completions.create(messages=HI, **options)
    if stream:
        calls: dict[int, list[str]] = {}
        async for chunk in made:
            for part in chunk.choices[0].delta.tool_calls or []:
                calls.setdefault(part.index, []).append(part.function.arguments)
        arguments = ["".join(parts) for parts in calls.values()]
    else:
        assert made.choices[0].message.content == "Let me look." and made.choices[0].finish_reason == "tool_calls"
        arguments = [call.function.arguments for call in made.choices[0].message.tool_calls]
    assert [json.loads(one) for one in arguments] == [{"city": "Oslo"}, {"city": "Rome"}]
    ids = ["one", "two"]
    function = [{"name": "weather", "arguments": one} for one in arguments]
    said = [{"id": i, "type": "function", "function": one} for i, one in zip(ids, function)]
    results: list[Any] = [{"role": "tool", "tool_call_id": i, "content": f"result {i}"} for i in ids]
    history: list[Any] = [*HI, {"role": "assistant", "content": "Let me look.", "tool_calls": said}, *results, *HI]
    await front.openai.chat.completions.create(messages=history, **options)
    first, second = model.prompts()
    for prompt in (first, second):
        assert prompt.count(json.dumps(WEATHER)) == 1 and prompt.endswith("<|a|>")
    assert f"<|assistant|>Let me look.\n{CALL}\n" in second
    assert "<tool_response>\nresult one\n</tool_response>\n<tool_response>\nresult two\n</tool_response>\nHi" in second
    assert len(model.questions) == 1, "asked once whether it takes system messages"


@pytest.mark.parametrize(("template", "role"), [(PLAIN, "system"), (NO_SYSTEM + PLAIN, "user"), (SILENT, "user")])
async def test_tools_are_described_where_the_model_reads_it(start, template, role):
    model = Model(template, "a", "b")
    front = await start(model)
    for messages in (HI, [SYSTEM, *HI]) if role == "system" else (HI,):
        assert (await front.post("/v1/chat/completions", {"messages": messages, "tools": [WEATHER]})).status_code == 200
        sent = model.requests[-1].messages
        assert "<tools>" in sent[0]["content"] and sent[0]["role"] == role and "tools" not in model.requests[-1].chat
        assert sent[0]["content"].startswith("Be brief.\n\n") == (messages != HI)
        assert sent[-1]["content"].endswith("Hi")


async def test_what_must_be_called_is_constrained_with_any_template(start):
    model = Model(PLAIN, CALL, CALL, "text")
    front = await start(model)
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        body = {"messages": HI, "tools": [WEATHER], "tool_choice": choice}
        response = (await front.post("/v1/chat/completions", body)).json()
        assert response["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        tag = json.loads(model.requests[-1].sampling["structured_outputs"]["structural_tag"])["format"]
        assert tag["type"] == "tags_with_separator" and tag["tags"][0]["begin"].startswith("<tool_call>")
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": "none"}
    await front.post("/v1/chat/completions", body)
    assert model.requests[-1].messages == HI and "structured_outputs" not in model.requests[-1].sampling


@pytest.mark.parametrize(
    ("info", "converted"),
    [
        ({}, True),  # the template would leave calls out
        ({"takes_tools": True}, False),  # it has a form of its own, which no parser here knows
        ({"takes_tools": True, "tool_format": "hermes"}, False),
    ],
)
async def test_past_calls_are_converted_if_the_template_has_no_tools(start, info, converted):
    model = Model(PLAIN, "a", **info)
    front = await start(model)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "5"}
    history = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert (await front.post("/v1/chat/completions", {"messages": history})).status_code == 200
    assert ("tool_calls" not in model.requests[0].messages[1]) == converted
    assert [message["role"] for message in model.requests[0].messages][2] == ("user" if converted else "tool")


async def test_responses_have_tools_with_any_template(start):
    front = await start(Model(PLAIN, CALL))
    tool: Any = {"type": "function", **WEATHER["function"]}
    answer = await front.openai.responses.create(model="demo", input="Hi", tools=[tool])
    assert answer.output[0].type == "function_call" and json.loads(answer.output[0].arguments) == {"city": "Oslo"}


async def test_a_backend_that_cannot_be_asked_gets_a_system_message(start):
    model = Model(PLAIN, CALL)
    model.inputs["demo"] = ("text_input", "messages", "stream", "sampling_parameters")
    front = await start(model)
    assert (await front.post("/v1/chat/completions", {"messages": HI, "tools": [WEATHER]})).status_code == 200
    assert model.requests[0].messages[0]["role"] == "system" and not model.questions


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    broken = {"function": {"name": "ü", "arguments": '{"city": '}}
    (message,) = with_tools([{"role": "assistant", "content": "", "tool_calls": [broken]}], [], False)
    assert message == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "ü", "arguments": {"city": }\n</tool_call>',
    }


def test_very_many_results_take_linear_time() -> None:
    """Joined one by one, 40,000 took a minute and a half, during which the gateway answered nothing else."""
    results = [{"role": "tool", "tool_call_id": "1", "content": "a" * 40}] * 40_000
    first, second = with_tools([*HI, *results], [], True)
    assert first == HI[0] and second["content"].count("<tool_response>") == 40_000
