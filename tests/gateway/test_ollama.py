"""Ollama's API against a scripted client: requests, lines, models, errors."""

from __future__ import annotations

import asyncio
import datetime
import json
from typing import Any

import pytest
from scripted_client import ScriptedClient, text, vectors

from inflight_client import ChoiceDelta, InvalidRequestError, Logprob, StreamChunk, UnavailableError

HI = [{"role": "user", "content": "Hi"}]
CHAT, GENERATE = {"model": "demo", "messages": HI}, {"model": "demo", "prompt": "Hi"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
FINAL = {
    *("done_reason", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count"),
    "eval_duration",
}


def ok(request: Any) -> list[StreamChunk]:
    return text("Hel", "lo")


async def lines_of(front: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await front.post(path, body)
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    for line in lines:
        assert line["model"] == body["model"]
        assert datetime.datetime.fromisoformat(line["created_at"].replace("Z", "+00:00")).tzinfo
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].keys() >= FINAL and not FINAL & lines[0].keys()
    return lines


async def test_a_chat_streams_lines(start):
    front = await start(ok)
    lines = await lines_of(front, "/api/chat", CHAT)
    assert [line["message"] for line in lines] == [{"role": "assistant", "content": text} for text in ("Hel", "lo", "")]
    assert (lines[-1]["done_reason"], lines[-1]["prompt_eval_count"], lines[-1]["eval_count"]) == ("stop", 3, 2)
    assert front.client.requests[0].messages == HI and front.client.requests[0].sampling == {"max_tokens": 2048}


async def test_a_prompt_is_rendered_unless_it_is_raw(start):
    front = await start(ok)
    lines = await lines_of(front, "/api/generate", {**GENERATE, "system": "Be brief."})
    assert [line["response"] for line in lines] == ["Hel", "lo", ""]
    assert front.client.requests[0].messages == [{"role": "system", "content": "Be brief."}, *HI]
    for body in ({"raw": True}, {"suffix": "there"}):
        front.client.info.update(fim_template="P{prefix}S{suffix}M", fim_stop_token_ids=[9])
        await lines_of(front, "/api/generate", {**GENERATE, **body})
    raw, filled = front.client.requests[1:]
    assert (raw.prompt, filled.prompt) == ("Hi", "PHiSthereM")
    assert raw.sampling == {"max_tokens": 2048} and filled.sampling["stop_token_ids"] == [9]
    front.client.info["has_chat_template"] = False
    front = await start(front.client)
    await lines_of(front, "/api/generate", GENERATE)
    assert front.client.requests[-1].prompt == "Hi", "a base model"


@pytest.mark.parametrize(("path", "body"), [("/api/chat", CHAT), ("/api/generate", GENERATE)])
async def test_one_answer_has_all(start, path, body):
    front = await start(lambda request: text("Hel", "lo", finish="length"))
    answer = (await front.post(path, {**body, "stream": False})).json()
    assert answer["done"] is True and answer["done_reason"] == "length" and answer.keys() >= FINAL
    shown = answer["message"]["content"] if path == "/api/chat" else answer["response"]
    assert shown == "Hello" and (answer["prompt_eval_count"], answer["eval_count"]) == (3, 2)
    assert all(isinstance(answer[name], int) and answer[name] >= 0 for name in answer if name.endswith("_duration"))
    assert answer["total_duration"] > 0


@pytest.mark.parametrize("times, duration", [((0.25, 0.5, 1.0), 750_000_000), ((0.25, 0.25, 0.25), 1)])
async def test_durations_are_those_of_the_stream(start, times, duration):
    """At least one nanosecond, for clients that divide by it, although all tokens came together."""

    def answer(request: Any) -> list[StreamChunk]:
        chunks = text("a", "b", "c")
        for chunk, elapsed in zip(chunks, times, strict=True):
            chunk.elapsed = elapsed
        return chunks

    final = (await lines_of(await start(answer), "/api/chat", CHAT))[-1]
    assert (final["prompt_eval_duration"], final["eval_duration"]) == (250_000_000, duration)
    assert final["total_duration"] >= final["load_duration"] > 0


async def test_options_have_the_names_of_this_server(start):
    front = await start(ok)
    options = {
        "num_predict": 5,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["x"],
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "mirostat": 0,
        "tfs_z": 1,
        "typical_p": 1.0,
    }
    for path, body in (("/api/chat", CHAT), ("/api/generate", GENERATE), ("/api/generate", {**GENERATE, "raw": True})):
        await lines_of(front, path, {**body, "options": options})
        assert front.client.requests[-1].sampling == {
            "max_tokens": 5,
            "temperature": 0.5,
            "top_k": 4,
            "top_p": 0.9,
            "min_p": 0.1,
            "seed": 7,
            "stop": ["x"],
            "repetition_penalty": 1.5,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
        }
    for unlimited in (-1, -2, 0):
        await lines_of(front, "/api/chat", {**CHAT, "options": {"num_predict": unlimited, "seed": -1, "stop": []}})
        assert front.client.requests[-1].sampling == {"max_tokens": 2048}


async def test_options_without_an_effect_are_said(start):
    front = await start(ok)
    for name, value in (("num_ctx", 4096), ("repeat_last_n", 64), ("penalize_newline", True), ("num_ctxs", 5)):
        response = await front.post("/api/chat", {**CHAT, "options": {name: value}})
        assert response.status_code == 200 and f"options.{name}" in response.headers["x-inflight-warning"]
    for quiet in ({"options": {"num_gpu": 1, "num_thread": 8, "use_mmap": None}}, {"truncate": True}):
        assert "x-inflight-warning" not in (await front.post("/api/chat", {**CHAT, **quiet})).headers
    assert "keep_alive" in (await front.post("/api/chat", {**CHAT, "keep_alive": "5m"})).headers["x-inflight-warning"]
    strict = await start(ok, strict=True)
    assert (await strict.post("/api/chat", {**CHAT, "options": {"num_ctxs": 5}})).status_code == 400
    assert (await strict.post("/api/chat", {**CHAT, "options": {"num_gpu": 5}})).status_code == 200


async def test_a_format_constrains_the_answer(start):
    front = await start(ok)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for format, expected in (("json", {"json_object": True}), (schema, {"json": schema}), ("", None), (None, None)):
        for path, body in (("/api/chat", CHAT), ("/api/generate", {**GENERATE, "raw": True})):
            await lines_of(front, path, {**body, "format": format})
            assert front.client.requests[-1].sampling.get("structured_outputs") == expected
    assert (await front.post("/api/chat", {**CHAT, "format": "xml"})).status_code == 400


@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_is_thinking(start, stream):
    front = await start(lambda request: text("<think>hm", "</think>", "5"))
    front.client.info.update(reasoning_tags=["<think>", "</think>"])
    for think, shown in ((None, "hm"), (True, "hm"), ("low", "hm"), (False, "")):
        for path, body in (("/api/chat", CHAT), ("/api/generate", GENERATE)):
            response = await front.post(path, {**body, "think": think, "stream": stream})
            parts = [json.loads(line) for line in response.text.splitlines()]
            parts = [part["message"] if path == "/api/chat" else part for part in parts]
            assert "".join(part.get("thinking", "") for part in parts) == shown
            assert "".join(part.get("content") or part.get("response") or "" for part in parts) == "5"
    assert front.client.requests[-1].chat["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    refused = await front.post("/api/chat", {**CHAT, "think": "much"})
    assert refused.status_code == 400 and refused.json()["error"].startswith("think: ")


@pytest.mark.parametrize("stream", [True, False])
async def test_tools_are_called_with_objects(start, stream):
    front = await start(lambda request: text("I look. ", *CALL))
    front.client.info["tool_format"] = "hermes"
    response = await front.post("/api/chat", {**CHAT, "tools": [WEATHER], "stream": stream})
    lines = [json.loads(line) for line in response.text.splitlines()]
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    (call,) = calls
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}} and call["id"]
    assert "".join(line["message"]["content"] for line in lines) == "I look."
    assert lines[-1]["done_reason"] == "stop"
    assert front.client.requests[0].chat["tools"] == [WEATHER]


async def test_a_call_that_is_cut_off_is_no_call(start):
    front = await start(lambda request: text(*CALL[:55], finish="length"))
    front.client.info["tool_format"] = "hermes"
    answer = (await front.post("/api/chat", {**CHAT, "tools": [WEATHER], "stream": False})).json()
    assert "tool_calls" not in answer["message"] and answer["done_reason"] == "length"


async def test_a_conversation_with_tools_goes_on(start):
    front = await start(ok)
    front.client.info["tool_format"] = "hermes"
    calls = [
        {"function": {"name": "weather", "arguments": {"city": "Oslo"}}},
        {"function": {"name": "time", "arguments": {}}},
    ]
    messages = [
        *HI,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "tool_name": "time", "content": "noon"},
        {"role": "tool", "content": "5 degrees"},
        {"role": "tool", "content": "of no call"},
    ]
    await lines_of(front, "/api/chat", {**CHAT, "messages": messages, "tools": [WEATHER]})
    _, answer, first, second, third = front.client.requests[0].messages
    ids = [call["id"] for call in answer["tool_calls"]]
    assert answer["tool_calls"][0]["function"] == calls[0]["function"] and answer["reasoning_content"] == "hm"
    assert (first["tool_call_id"], second["tool_call_id"]) == (ids[1], ids[0]) and first["name"] == "time"
    assert third["tool_call_id"] not in ids


def with_logprobs(request: Any) -> list[StreamChunk]:
    row = {7: Logprob(-0.5, 1, "a"), 8: Logprob(-1.5, 2, "b")}
    return [
        StreamChunk([ChoiceDelta(0, "a", [7], 1, None, [row])], 3),
        StreamChunk([ChoiceDelta(0, "", [7], 1, "stop", [row])], 3),
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities(start, stream):
    front = await start(with_logprobs)
    for path, body in (("/api/chat", CHAT), ("/api/generate", GENERATE), ("/api/generate", {**GENERATE, "raw": True})):
        body = {**body, "logprobs": True, "top_logprobs": 2, "stream": stream}
        response = await front.post(path, body)
        entries = [entry for line in response.text.splitlines() for entry in json.loads(line).get("logprobs", ())]
        assert [(entry["token"], entry["logprob"]) for entry in entries] == [("a", -0.5)] * 2
        assert [one["token"] for one in entries[0]["top_logprobs"]] == ["a", "b"]
        assert front.client.requests[-1].sampling["logprobs"] == 2


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/api/chat", {"messages": HI}, "model is missing"),
        ("/api/chat", {**CHAT, "model": "x"}, "The model 'x' does not exist; models here: demo"),
        ("/api/chat", {**CHAT, "model": "x:latest"}, "The model 'x:latest' does not exist"),
        ("/api/chat", {**CHAT, "messages": "Hi"}, "messages: a list of objects"),
        ("/api/chat", {**CHAT, "messages": ["Hi"]}, "messages[0]: an object"),
        ("/api/chat", {**CHAT, "messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "[0].images: images"),
        ("/api/chat", {**CHAT, "messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
        ("/api/chat", {**CHAT, "options": {"temperature": "hot"}}, "options.temperature"),
        ("/api/chat", {**CHAT, "options": {"mirostat": 2}}, "options.mirostat: 2 came"),
        ("/api/chat", {**CHAT, "options": {"typical_p": 0.5}}, "options.typical_p: 0.5 came"),
        ("/api/generate", {**GENERATE, "images": ["aa"]}, "images is not supported"),
        ("/api/generate", {**GENERATE, "context": [1]}, "context is not supported"),
        ("/api/generate", {**GENERATE, "template": "{{ .Prompt }}"}, "template is not supported"),
        ("/api/generate", {**GENERATE, "suffix": "b"}, "suffix: the tokenizer of model 'demo'"),
        ("/api/show", {}, "model is missing"),
        ("/api/show", {"model": "x"}, "does not exist"),
    ],
)
async def test_errors_have_ollamas_form(start, path, body, says):
    front = await start(ok)
    refused = await front.post(path, body)
    assert refused.status_code in (400, 404) and set(refused.json()) == {"error"}
    assert says in refused.json()["error"] and not front.client.requests


async def test_other_errors_have_ollamas_form(start):
    front = await start(lambda request: [UnavailableError("the queue is full")], api_keys=("key",))
    refused = await front.post("/api/chat", CHAT)
    assert refused.status_code == 401 and isinstance(refused.json()["error"], str)
    key = {"Authorization": "Bearer key"}
    full = await front.post("/api/chat", CHAT, headers=key)
    assert full.status_code == 429 and full.json() == {"error": "the queue is full"} and "retry-after" in full.headers
    for path in ("pull", "push", "create", "copy", "blobs/sha256:00"):
        managed = await front.post(f"/api/{path}", {"model": "x"}, headers=key)
        assert managed.status_code == 404 and "the operator of this server loads its models" in managed.json()["error"]
    deleted = await front.http.request("DELETE", "/api/delete", json={"model": "demo"}, headers=key)
    assert deleted.status_code == 404 and "operator" in deleted.json()["error"]
    for path in ("nowhere", "web_search"):
        absent = await front.post(f"/api/{path}", {"model": "x"}, headers=key)
        assert absent.status_code == 404 and "is not supported" in absent.json()["error"]
    assert isinstance((await front.http.get("/api/chat", headers=key)).json()["error"], str)


async def test_a_failure_in_mid_stream_is_the_last_line(start):
    front = await start(lambda request: [*text("a", "b", finish=None), InvalidRequestError("broken")])
    response = await front.post("/api/chat", CHAT)
    assert json.loads(response.text.splitlines()[-1]) == {"error": "broken"}


async def test_silence_is_filled_with_empty_lines(start):
    go_on = asyncio.Event()
    front = await start(lambda request: [go_on, *text("a")], keep_alive_seconds=0.02)
    async with front.http.stream("POST", "/api/chat", json=CHAT) as response:
        lines = response.aiter_lines()
        assert json.loads(await anext(lines))["message"]["content"] == ""
        go_on.set()
        rest = [json.loads(line) async for line in lines]
    assert rest[-1]["done"] and "".join(line["message"]["content"] for line in rest) == "a"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_cancels_its_request(start, stream):
    front = await start(lambda request: [*text("a", finish=None), asyncio.Event()])
    body = json.dumps({**CHAT, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", front.http.base_url.port)
    head = f"POST /api/chat HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    if stream:
        await reader.readuntil(b'"a"')
    while not front.client.streams:
        await asyncio.sleep(0)
    assert front.gateway.metrics.open_requests == 1
    writer.close()
    await asyncio.wait_for(front.client.streams[0].cancelled.wait(), 20)
    while front.gateway.metrics.open_requests:
        await asyncio.sleep(0)


async def test_a_request_without_a_prompt_only_asks_for_the_model(start):
    front = await start(ok)
    loaded = (await front.post("/api/chat", {"model": "demo", "messages": []})).json()
    assert loaded["done"] is True and loaded["done_reason"] == "load" and loaded["message"]["content"] == ""
    loaded = (await front.post("/api/generate", {"model": "demo", "keep_alive": 0})).json()
    assert loaded["done"] is True and loaded["response"] == ""
    assert not front.client.requests


# -- models --------------------------------------------------------------------------------------------


async def test_models_have_ollamas_form(start):
    front = await start(ScriptedClient(ok, models=("demo", "org/other")))
    (model, other) = (await front.http.get("/api/tags")).json()["models"]
    assert model["name"] == model["model"] == "demo:latest" and other["name"] == "org/other:latest"
    assert model["digest"] == "c0ffee" and set(model["details"]) >= {"format", "family", "families"}
    (running, _) = (await front.http.get("/api/ps")).json()["models"]
    assert running["name"] == "demo:latest" and running["context_length"] == 2048 and running["expires_at"]
    for name in ("demo", "demo:latest", "org/other:latest"):
        assert (await front.post("/api/chat", {**CHAT, "model": name, "stream": False})).json()["model"] == name
    assert [request.model for request in front.client.requests] == ["demo", "demo", "org/other"]


async def test_a_name_can_have_the_tag_itself(start):
    front = await start(ScriptedClient(ok, models=("x:latest", "y:7b")))
    for name in ("x:latest", "y:7b"):
        assert (await front.post("/api/chat", {**CHAT, "model": name})).status_code == 200
    assert [request.model for request in front.client.requests] == ["x:latest", "y:7b"]


async def test_a_model_is_shown(start):
    front = await start(ok)
    shown = (await front.post("/api/show", {"model": "demo:latest", "verbose": True})).json()
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 2048
    assert shown["capabilities"] == ["completion", "tools"] and shown["template"] == ""
    front.client.info.update(reasoning_tags=["<think>", "</think>"], fim_template="P{prefix}S{suffix}")
    front = await start(front.client, enable_tokenizer_info_endpoint=True)
    shown = (await front.post("/api/show", {"name": "demo"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking", "insert"]
    assert shown["template"] == "{{ messages }}"


async def test_the_server_is_found(start):
    front = await start(ok, api_keys=("key",))
    for method in ("GET", "HEAD"):
        assert (await front.http.request(method, "/")).status_code == 200
    version = (await front.http.get("/api/version")).json()["version"]
    assert all(part.isdigit() for part in version.split("."))


async def test_a_foreign_page_cannot_chat(start):
    front = await start(ok)
    headers = {"Origin": "https://page.example", "Content-Type": "text/plain"}
    refused = await front.http.post("/api/chat", content=json.dumps(CHAT), headers=headers)
    assert refused.status_code == 415 and isinstance(refused.json()["error"], str)
    curl = {"Content-Type": "application/x-www-form-urlencoded"}
    assert (await front.http.post("/api/chat", content=json.dumps(CHAT), headers=curl)).status_code == 200


@pytest.mark.parametrize(
    ("given", "inputs"), [("abc", ["abc"]), (["abc", "de"], ["abc", "de"]), ("abc " * 1000, ["abc " * 1000])]
)
async def test_texts_are_embedded_and_cut_off_at_the_end(start, given, inputs):
    front = await start(lambda request: vectors(request))
    body = {"model": "demo:latest", "input": given, "dimensions": 2, "options": {"num_ctx": 1}, "keep_alive": "5m"}
    answer = await front.post("/api/embed", body)
    asked = {"task": "embed", "inputs": inputs, "dimensions": 2, "normalize": True, "truncate_prompt_tokens": -1}
    assert front.client.requests[0].pooling == asked
    found = answer.json()
    assert list(found) == ["model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"]
    assert found["model"] == "demo:latest" and 0 <= found["load_duration"] < found["total_duration"]
    assert found["prompt_eval_count"] == sum(map(len, inputs))
    assert found["embeddings"] == [pytest.approx([len(one), 0.1]) for one in inputs]
    await front.post("/api/embed", {"model": "demo", "input": given, "truncate": False})
    assert front.client.requests[1].pooling == {"task": "embed", "inputs": inputs, "normalize": True}


async def test_the_older_path_embeds_one_text_as_the_model_does(start):
    front = await start(lambda request: vectors(request))
    answer = await front.post("/api/embeddings", {"model": "demo", "prompt": "abc"})
    assert answer.json() == {"embedding": pytest.approx([3.0, 0.1, -0.5, 1e-8])}
    asked = {"task": "embed", "inputs": ["abc"], "normalize": False, "truncate_prompt_tokens": -1}
    assert front.client.requests[0].pooling == asked


async def test_nothing_to_embed_only_loads_a_model(start):
    front = await start(lambda request: vectors(request))
    for nothing in ({}, {"input": ""}, {"input": []}):
        answer = await front.post("/api/embed", {"model": "demo", **nothing})
        assert answer.json() == {"model": "demo", "embeddings": []}
    for nothing in ({}, {"prompt": ""}):
        assert (await front.post("/api/embeddings", {"model": "demo", **nothing})).json() == {"embedding": []}
    assert not front.client.requests
    unknown = await front.post("/api/embed", {"model": "x"})
    assert unknown.status_code == 404 and "does not exist" in unknown.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("embed", {"input": 5}, "input: a text or a list of texts is expected"),
        ("embed", {"input": [5, 6]}, "input: a text or a list of texts is expected"),
        ("embed", {"input": ["a", ""]}, "input[1]: "),
        ("embed", {"input": ["a", "\x00"]}, "input[1]: a prompt of 5000 tokens"),
        ("embed", {"input": ["a"] * 2049}, "max_inputs"),
        ("embeddings", {"prompt": ["a"]}, "prompt: "),
        ("embeddings", {"prompt": "\x00"}, "prompt[0]: a prompt of 5000 tokens"),
    ],
)
async def test_inputs_that_cannot_be_embedded_are_refused_in_ollamas_form(start, path, body, says):
    front = await start(lambda request: vectors(request))
    refused = await front.post(f"/api/{path}", {"model": "demo", **body})
    assert refused.status_code == 400 and set(refused.json()) == {"error"} and says in refused.json()["error"]


async def test_a_model_that_only_embeds_says_so(start):
    client = ScriptedClient(ok)
    client.info.update(generates=False, pooling_tasks=["embed", "score"])
    front = await start(client)
    assert (await front.post("/api/show", {"model": "demo"})).json()["capabilities"] == ["embedding"]


async def test_a_model_that_neither_generates_nor_embeds_has_no_capability_that_ollama_knows(start):
    client = ScriptedClient(ok)
    client.info.update(generates=False, pooling_tasks=["score", "classify"])
    front = await start(client)
    assert (await front.post("/api/show", {"model": "demo"})).json()["capabilities"] == []
