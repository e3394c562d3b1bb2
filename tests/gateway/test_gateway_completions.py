"""`/v1/completions` against a scripted client, through OpenAI's own library."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from scripted_client import ScriptedClient, text

from inflight_client import InvalidRequestError, Logprob, UnavailableError


async def test_an_answer_has_openais_form(start):
    front = await start(lambda request: text("Hel", "lo"))
    answer = await front.openai.completions.create(model="demo", prompt="Hi", max_tokens=5)
    assert answer.choices[0].text == "Hello" and answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 2, 5)
    assert (
        answer.id.startswith("cmpl-")
        and answer.model == "demo"
        and answer.system_fingerprint == "inflight-0.1.0-c0ffee"
    )
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


async def test_token_ids_far_beyond_the_context_are_refused_before_they_are_converted(start):
    """Half a million would keep the event loop, and all other requests, waiting."""
    front = await start(lambda request: text("a"))
    for prompt, said in (([[7], [7] * 500_000], "prompt[1]: 500000"), ([7] * 140_000, "prompt: 140000")):
        answer = await front.post("/v1/completions", {"model": "demo", "prompt": prompt})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "prompt")
        assert error["message"].startswith(f"{said} token ids came; at most 2047 are allowed")
    assert not front.client.requests, "the client library makes no request of them"
    cut = {"model": "demo", "prompt": [7] * 140_000, "truncate_prompt_tokens": -1}
    assert (await front.post("/v1/completions", cut)).status_code == 200, "the server cuts them"


async def test_the_model_decides_what_is_beyond_its_context(start):
    """It may have been loaded with a longer one since it was asked, or a Triton may have one that another has not."""
    front = await start(lambda request: text("a"))
    assert (await front.post("/v1/completions", {"model": "demo", "prompt": [7]})).status_code == 200
    front.client.info = {**front.client.info, "max_model_len": 4096}
    assert (await front.post("/v1/completions", {"model": "demo", "prompt": [7] * 3000})).status_code == 200
    assert (await front.gateway.upstream.find("demo")).info["max_model_len"] == 2048, "what the gateway knows is old"


async def test_streams_of_several_prompts_keep_the_numbers(start):
    front = await start(lambda request: [*text("a", "b", "c", index=1, n=2), *text("z", index=0, n=2)])
    stream = await front.openai.completions.create(model="demo", prompt=[[1], [2, 3]], n=2, stream=True)
    texts, ends = [""] * 4, [None] * 4
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == ["z", "abc", "z", "abc"] and ends == ["stop"] * 4


async def test_usage_says_what_came_from_the_cache(start):
    def answer(request):
        assert request.return_num_cached_tokens
        chunks = text("a", "b", prompt=9)
        chunks[0].num_cached_tokens = 4
        return chunks

    front = await start(answer)
    answer_ = await front.openai.completions.create(model="demo", prompt="Hi")
    assert answer_.usage.prompt_tokens_details.cached_tokens == 4
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await front.openai.completions.create(
        model="demo", prompt=["Hi", "Ho"], stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 4]
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 8 and chunks[-1].usage.prompt_tokens == 18


async def test_without_usage_no_chunk_has_any(start):
    front = await start(lambda request: text("a", "b"))
    response = await front.post("/v1/completions", {"prompt": "Hi", "stream": True})
    assert "usage" not in response.text


def with_logprobs(*tokens, finish="length", prompt=()):
    """A chunk a token, whose candidates are itself and another one."""

    def row(number, token):
        return {number: Logprob(-0.5, 2, token), 99: Logprob(-0.1, 1, "best")}

    chunks = text(*tokens, finish=finish)
    for number, (chunk, token) in enumerate(zip(chunks, tokens)):
        chunk.choices[0].logprobs = [row(number, token)]
    if prompt:
        chunks[0].prompt_logprobs = [None, *(row(50 + number, token) for number, token in enumerate(prompt))]
    return chunks


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_have_the_legacy_form(start, stream):
    front = await start(lambda request: with_logprobs("He", "llo"))
    parts = await parts_of(front, stream, prompt="Hi", logprobs=1)
    assert front.client.requests[0].sampling["logprobs"] == 1
    joined = {key: [x for part in parts for x in getattr(part.logprobs, key)] for key in LISTS}
    assert joined == {
        "tokens": ["He", "llo"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"He": -0.5, "best": -0.1}, {"llo": -0.5, "best": -0.1}],
        "text_offset": [0, 2],
    }


LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


async def parts_of(front, stream, **body):
    """The choice of a request, or its parts in a stream."""
    made = await front.openai.completions.create(model="demo", stream=stream, **body)
    return [chunk.choices[0] async for chunk in made] if stream else made.choices


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Say hi", [83, 97, 121, 32, 104, 105]])
async def test_echo_repeats_the_prompt_with_its_log_probabilities(start, stream, prompt):
    front = await start(lambda request: with_logprobs("!", prompt=("y ", "hi")))
    parts = await parts_of(front, stream, prompt=prompt, echo=True, logprobs=0)
    assert "".join(part.text for part in parts) == "Say hi!"
    joined = {key: [x for part in parts for x in getattr(part.logprobs, key)] for key in LISTS}
    assert joined["tokens"] == ["Sa", "y ", "hi", "!"]
    assert joined["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert joined["text_offset"] == [0, 2, 4, 6]
    assert joined["top_logprobs"] == [None, {"y ": -0.5}, {"hi": -0.5}, {"!": -0.5}]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_new_tokens_are_allowed_with_echo(start, stream):
    front = await start(lambda request: with_logprobs("!", finish="length", prompt=("b",)))
    options = {"stream_options": {"include_usage": True}} if stream else {}
    made = await front.openai.completions.create(
        model="demo", prompt="ab", max_tokens=0, echo=True, logprobs=1, stream=stream, **options
    )
    answers = [chunk async for chunk in made] if stream else [made]
    (choice,) = [choice for answer in answers for choice in answer.choices]
    assert (choice.text, choice.finish_reason, choice.logprobs.tokens) == ("ab", "length", ["a", "b"])
    assert answers[-1].usage.completion_tokens == 0
    assert front.client.requests[0].sampling["max_tokens"] == 1
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        await front.openai.completions.create(model="demo", prompt="ab", max_tokens=0)


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_returned_if_asked_for(start, stream):
    front = await start(lambda request: text("x", "y"))
    parts = await parts_of(front, stream, prompt="ab", extra_body={"return_token_ids": True})
    assert [token for part in parts for token in part.token_ids] == [7, 7]
    assert [part.prompt_token_ids for part in parts] == [[97, 98], None][: len(parts)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Say hi", [83, 97, 121, 32, 104, 105]])
async def test_what_is_left_of_a_truncated_prompt_is_returned(start, stream, prompt):
    front = await start(lambda request: text("!"))
    cut = {"return_token_ids": True, "truncate_prompt_tokens": 2}
    parts = await parts_of(front, stream, prompt=prompt, echo=True, extra_body=cut)
    assert parts[0].prompt_token_ids == [104, 105] and "".join(part.text for part in parts) == "hi!"
    parts = await parts_of(front, stream, prompt=prompt, echo=True, extra_body={"truncate_prompt_tokens": 2})
    assert "".join(part.text for part in parts) == "hi!"


async def test_minus_one_truncates_a_prompt_to_what_fits(start):
    front = await start(lambda request: text("!"))
    front.client.info["max_model_len"] = 4
    cut = {"return_token_ids": True, "truncate_prompt_tokens": -1}
    parts = await parts_of(front, False, prompt=[1, 2, 3, 4, 5], extra_body=cut)
    assert parts[0].prompt_token_ids == [3, 4, 5]


async def test_a_text_that_is_held_back_sends_no_empty_event(start):
    front = await start(lambda request: text("a", "", "", "b"))
    stream = await front.openai.completions.create(model="demo", prompt="Hi", stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["a", "b"]


async def test_every_option_reaches_the_model_under_its_name(start):
    front = await start(lambda request: text("a"))
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "frequency_penalty": 1.0,
        "presence_penalty": -1.0,
        "seed": 3,
        "stop": ["x"],
        "n": 1,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [4],
        "skip_special_tokens": False,
        "bad_words": ["w"],
        "allowed_token_ids": [1, 2],
        "truncate_prompt_tokens": 5,
        "structured_outputs": {"regex": "a"},
        "max_tokens": 3,
        "include_stop_str_in_output": True,
        "logit_bias": {"5": -1.0},
        "prompt_logprobs": 1,
    }
    others = {"cache_salt": "s", "priority": -2, "user": "me", "request_id": "id-1"}
    response = await front.post("/v1/completions", {"prompt": "Hi", **sampling, **others})
    request = front.client.requests[0]
    assert response.status_code == 200 and response.headers["x-request-id"] == "id-1"
    assert request.sampling == sampling
    assert (request.cache_salt, request.request_priority, request.tenant) == ("s", -2, "me")
    assert request.request_id == "id-1-0" and request.timeout == 600.0


async def test_a_header_names_the_tenant_before_the_user(start):
    front = await start(lambda request: text("a"), tenant_header="x-tenant")
    for headers, tenant in (({"X-Tenant": "team"}, "team"), ({}, "me")):
        await front.post("/v1/completions", {"prompt": "Hi", "user": "me"}, headers=headers)
        assert front.client.requests[-1].tenant == tenant


async def test_what_is_wrong_is_named(start):
    front = await start(lambda request: text("a"))
    for body, param in [
        ({}, "prompt"),
        *(({"prompt": prompt}, "prompt") for prompt in ([], None, 5, {}, [1, "a"], [True], [[1], ["a"]], [1.5])),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 1_000_000_000}, "n"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "end"}, "suffix"),
        ({"prompt": "a", "max_tokens": "three"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "stop": [1]}, "stop"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "request_id": "a b"}, "request_id"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": ["a"] * 129}, "prompt"),
    ]:
        response = await front.post("/v1/completions", {"model": "demo", **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), body
        assert not front.client.streams and len(error["message"]) < 300


@pytest.mark.parametrize("prompt", [[[]], [""], ""])
async def test_an_empty_prompt_is_the_models_to_refuse(start, prompt):
    front = await start(lambda request: [InvalidRequestError("the prompt is empty: at least 1 token is expected")])
    response = await front.post("/v1/completions", {"prompt": prompt})
    assert response.status_code == 400 and "prompt is empty" in response.text


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
    silence = asyncio.Event()
    front = await start(lambda request: [silence, *text("a")], keep_alive_seconds=0.05)
    lines = []
    async with front.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if line == ": keep-alive":
                silence.set()
    assert lines[0] == ": keep-alive" and lines[-2] == "data: [DONE]"


async def test_long_options_for_many_prompts_do_not_make_more_of_a_body_than_one_may_have(start):
    """Each prompt is a request of its own, with all options: 2 GB of 128 prompts and 15 MB."""
    front = await start(lambda request: text("a"), max_body_bytes=10_000, fim_template="{prefix}{suffix}")
    for options in (
        {"cache_salt": "s" * 3000},
        {"suffix": "s" * 3000},
        {"stop": ["s" * 1000] * 3},
        {"structured_outputs": {"regex": "s" * 3000}},
    ):
        refused = await front.post("/v1/completions", {"prompt": ["a"] * 5, **options})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"
        assert "5 prompts" in refused.text and "10000" in refused.text and not front.client.requests
    assert (await front.post("/v1/completions", {"prompt": ["a"] * 3, "cache_salt": "s" * 3000})).status_code == 200
