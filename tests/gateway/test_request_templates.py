"""Chat templates that requests bring: refused, or handed to the model."""

from __future__ import annotations

import pytest
from scripted_client import text

HI = [{"role": "user", "content": "Hi"}]
CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
TOOL = {"type": "function", "function": {"name": "f"}}
TAGS = ["<think>", "</think>"]


def ok(request):
    return text("a")


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
async def test_a_template_is_refused_by_name(start, path):
    front = await start(ok)
    refused = await front.post(path, {"messages": HI, "chat_template": "x"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"
    assert "--trust-request-chat-template" in refused.json()["error"]["message"]
    assert not front.client.requests and not front.client.questions
    assert (await front.post(path, {"messages": HI, "chat_template": None})).status_code == 200


async def test_a_trusted_template_reaches_the_model(start):
    front = await start(ok, trust_request_chat_template=True)
    body = {"messages": HI, "chat_template": "mine {{ x }}", "chat_template_kwargs": {"x": 5}, "return_token_ids": True}
    assert (await front.post(CHAT, body)).status_code == 200
    assert front.client.requests[0].chat == {"chat_template": "mine {{ x }}", "chat_template_kwargs": {"x": 5}}
    assert front.client.questions[-1]["chat_template"] == "mine {{ x }}", "the prompt's token ids are of that template"
    assert (await front.post(TOKENIZE, {"messages": HI, "chat_template": "mine"})).status_code == 200
    assert front.client.questions[-1]["chat_template"] == "mine"
    for wrong in (5, ["a"], {}):
        assert (await front.post(CHAT, {"messages": HI, "chat_template": wrong})).status_code == 400
    refused = await front.post(TOKENIZE, {"prompt": "a", "chat_template": "mine"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"


async def test_tools_are_described_by_the_template_that_knows_them(start):
    front = await start(ok, trust_request_chat_template=True)
    front.client.info.update(takes_tools=False)
    await front.post(CHAT, {"messages": HI, "tools": [TOOL], "chat_template": "plain"})
    request = front.client.requests[-1]
    assert "tools" not in request.chat and request.messages[0]["role"] == "system"
    front.client.info.update(tool_format="hermes")
    front = await start(front.client, trust_request_chat_template=True)
    await front.post(CHAT, {"messages": HI, "tools": [TOOL], "chat_template": "{{ tools }}"})
    assert front.client.requests[-1].chat["tools"] == [TOOL] and front.client.requests[-1].messages == HI


async def test_the_template_decides_whether_an_answer_begins_with_reasoning(start):
    front = await start(lambda request: text("hm</think>5"), trust_request_chat_template=True)
    front.client.info.update(reasoning_tags=TAGS, reasoning_opened=False)

    async def detokenize(token_ids, *, model):
        return "<think>\n" if front.client.questions[-1].get("chat_template") == "opens" else "end"

    front.client.detokenize = detokenize
    for template, reasoning in (("opens", "hm"), ("closed", None), ("opens", "hm")):
        answer = await front.post(CHAT, {"messages": HI, "chat_template": template})
        assert answer.json()["choices"][0]["message"].get("reasoning") == reasoning
    assert len(front.client.questions) == 2, "each template is asked about once"
