"""`/v1/completions` against a scripted client, through OpenAI's own library."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from scripted_client import ScriptedClient, text

from inflight_client import InvalidRequestError, UnavailableError


async def test_an_answer_has_openais_form(start):
    front = await start(lambda request: text("Hel", "lo"))
    answer = await front.openai.completions.create(model="demo", prompt="Hi", max_tokens=5)
    assert answer.choices[0].text == "Hello" and answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 2, 5)
    assert answer.id.startswith("cmpl-") and answer.model == "demo" and "tiny" in answer.system_fingerprint
    assert front.client.requests[0].sampling == {"max_tokens": 5}


async def test_a_stream_has_openais_form(start):
    front = await start(lambda request: text("Hel", "lo"))
    options = {"include_usage": True}
    stream = await front.openai.completions.create(model="demo", prompt="Hi", stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert [c.choices[0].text for c in chunks[:-1]] == ["Hel", "lo"]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None, "stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 5


async def test_several_prompts_are_numbered_as_openai_numbers_them(start):
    front = await start(lambda request: text(str(request.input_ids), index=1, n=2))
    answer = await front.openai.completions.create(model="demo", prompt=[[1], [2, 3]], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["", "[1]", "", "[2, 3]"]


async def test_an_error_before_the_first_chunk_has_a_status(start):
    front = await start(lambda request: [InvalidRequestError("top_p=7: at most 1 is allowed")])
    with pytest.raises(openai.BadRequestError, match="top_p=7"):
        await front.openai.completions.create(model="demo", prompt="Hi", stream=True)


async def test_an_error_in_the_middle_ends_the_stream(start):
    front = await start(lambda request: [*text("a", finish=None), UnavailableError("the queue is full")])
    response = await front.post("/v1/completions", {"model": "demo", "prompt": "Hi", "stream": True})
    events = response.text.split("\n\n")
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "queue_full"
    assert events[2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_its_request(start, stream):
    client = ScriptedClient(lambda request: [*text("a", finish=None), asyncio.Event()])
    front = await start(client)
    body = json.dumps({"model": "demo", "prompt": "Hi", "stream": stream}).encode()
    _reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    while not client.streams:
        await asyncio.sleep(0.01)
    writer.close()
    await asyncio.wait_for(client.streams[0].cancelled.wait(), 10)
    while front.gateway.metrics.open_requests:
        await asyncio.sleep(0.01)


async def test_a_silent_stream_sends_comments(start):
    news = asyncio.Event()
    front = await start(lambda request: [news, *text("a")], keep_alive_seconds=0.05)
    lines = []
    async with front.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if line == ": keep-alive":
                news.set()
    assert lines[0] == ": keep-alive" and lines[-2] == "data: [DONE]"
