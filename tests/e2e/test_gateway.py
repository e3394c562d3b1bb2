"""OpenAI's API in front of a real tritonserver with the demo model, as `inflight serve --openai-port` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai import AsyncOpenAI
from processes_of import engine_process, engine_processes, open_when_stopped, run_in_turns, tries

from inflight_client import Client
from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.gateway_process import GatewayProcess
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

PROMPT = "Return a list of"
LONG: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def url(server: TritonServer) -> Iterator[str]:
    """A gateway's `base_url`."""
    (port,) = pick_ports(1)
    options = GatewayOptions(
        fim_template="<|im_start|>{prefix}<|im_end|>{suffix}<|im_end|>", enable_tokenizer_info_endpoint=True
    )
    gateway = GatewayProcess(options, ServerOptions(port=port, exit_timeout=2))
    gateway.start(server.grpc_address)
    yield gateway.url
    gateway.stop()


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def direct(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_address) as client:
        yield client


def stats(direct: Client) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(direct.control("stats"))["frontend"]
    return found


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    return value


@pytest.mark.parametrize("n", [1, 2])
async def test_whole_and_streamed_completions_equal_tritons(client: AsyncOpenAI, direct: Client, n: int) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "seed": 5, "n": n, "temperature": 0.8}
    expected = direct.generate(PROMPT, **options)
    whole = await client.completions.create(model="demo", prompt=PROMPT, **options)
    assert [choice.text for choice in whole.choices] == [choice.text for choice in expected.choices]
    assert [choice.finish_reason for choice in whole.choices] == [choice.finish_reason for choice in expected.choices]
    assert whole.usage is not None and whole.usage.completion_tokens == expected.usage.output_tokens
    assert whole.usage.prompt_tokens == expected.usage.input_tokens
    stream = await client.completions.create(
        model="demo", prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **options
    )
    texts, reasons, chunks = [""] * n, [None] * n, [chunk async for chunk in stream]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in expected.choices]
    assert reasons == [choice.finish_reason for choice in expected.choices]
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.system_fingerprint and whole.system_fingerprint == chunks[0].system_fingerprint


async def test_a_second_request_finds_its_prompt_in_the_cache(client: AsyncOpenAI) -> None:
    prompt = "def area(width, height):\n    " * 20
    cached = []
    for _ in range(2):
        answer = await client.completions.create(model="demo", prompt=prompt, max_tokens=1)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[1] > (cached[0] or 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_what_is_left_of_a_prompt_that_is_cut(client: AsyncOpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    cut = {"truncate_prompt_tokens": 4}
    for prompt in ([5, 6, 7, 8, 9, 10], "one two three four five six seven"):
        made = await client.completions.create(
            model="demo", prompt=prompt, max_tokens=1, stream=stream, extra_body=cut, **options
        )
        usage = [chunk async for chunk in made][-1].usage if stream else made.usage
        assert usage.prompt_tokens == 4 and usage.total_tokens == 5


async def test_what_is_left_of_a_prompt_that_is_cut_is_returned(client: AsyncOpenAI, direct: Client) -> None:
    cut: dict[str, Any] = {"truncate_prompt_tokens": 4, "return_token_ids": True}
    whole = "one two three four five six seven"
    options: dict[str, Any] = {"model": "demo", "max_tokens": 1, "temperature": 0}
    made = (await client.completions.create(prompt=whole, echo=True, logprobs=1, extra_body=cut, **options)).choices[0]
    ids = made.prompt_token_ids  # type: ignore[attr-defined]
    assert len(ids) == 4 and made.logprobs is not None and len(made.logprobs.tokens or ()) == 5
    again = await client.completions.create(prompt=ids, echo=True, **options)
    assert again.choices[0].text.endswith(made.text) and whole.startswith("one") and not made.text.startswith("one")
    chat: Any = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": whole}]}
    answer = await client.chat.completions.create(extra_body=cut, **chat)
    rendered = direct.tokenize(messages=chat["messages"])["tokens"]
    assert answer.prompt_token_ids == rendered[-4:]  # type: ignore[attr-defined]


async def test_a_stop_string_ends_the_text(client: AsyncOpenAI, direct: Client) -> None:
    text = direct.generate(PROMPT, max_tokens=30, temperature=0).text
    stop = text[10:14]
    answer = await client.completions.create(model="demo", prompt=PROMPT, max_tokens=30, temperature=0, stop=stop)
    assert answer.choices[0].text == text[: text.index(stop)] and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop  # type: ignore[attr-defined]


async def test_echo_with_log_probabilities_and_token_ids(client: AsyncOpenAI, direct: Client) -> None:
    ids = direct.tokenize(PROMPT)["tokens"]
    options: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True}
    answers = [
        (await client.completions.create(model="demo", prompt=prompt, **options)).choices[0] for prompt in (PROMPT, ids)
    ]
    of_text, of_ids = [answer.logprobs for answer in answers]
    assert of_text is not None and of_text.tokens is not None and of_text.token_logprobs is not None
    assert of_ids is not None and of_ids.tokens is not None
    assert of_text.token_logprobs == of_ids.token_logprobs and of_text.tokens[1:] == of_ids.tokens[1:]
    assert of_text.token_logprobs[0] is None and len(of_text.tokens) == len(ids) + 4
    # Special tokens are part of a prompt of ids, and no part of a text.
    assert answers[0].text.startswith(PROMPT) and "".join(of_text.tokens) == answers[0].text
    assert answers[1].text.startswith(direct.detokenize(ids)) and "".join(of_ids.tokens) == answers[1].text
    scored = await client.completions.create(model="demo", prompt=PROMPT, **{**options, "max_tokens": 0})
    assert scored.choices[0].text == PROMPT and scored.usage is not None and scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.token_logprobs == of_text.token_logprobs[: len(ids)]  # type: ignore[union-attr]


async def test_models_tokens_and_errors(client: AsyncOpenAI, direct: Client) -> None:
    (model,) = [model async for model in client.models.list()]
    assert model.id == "demo"
    tokens = await client.post("/../tokenize", body={"prompt": PROMPT}, cast_to=dict)  # type: ignore[type-var]
    assert tokens["tokens"] == direct.tokenize(PROMPT)["tokens"]
    text = await client.post("/../detokenize", body={"tokens": tokens["tokens"]}, cast_to=dict)  # type: ignore[type-var]
    assert text["prompt"].endswith(PROMPT)
    with pytest.raises(openai.NotFoundError, match="models here: demo"):
        await client.completions.create(model="gpt-4", prompt=PROMPT)
    for wrong in ({"temperature": -1.0}, {"logit_bias": {"999999999": 1}}, {"top_p": 7.0}):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="demo", prompt=PROMPT, stream=True, **wrong)  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="not in the vocabulary") as refused:
        await client.completions.create(model="demo", prompt=[10**9])
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_cancels_its_request(
    client: AsyncOpenAI, direct: Client, server: TritonServer, stream: bool
) -> None:
    cancelled = stats(direct)["requests"].get("cancelled", 0)
    engine = engine_process(server, "demo")
    engine.suspend()  # so that the request cannot end by itself; an answer of `stats` then takes its time
    try:
        request = asyncio.create_task(client.completions.create(stream=stream, **LONG))
        await until(lambda: stats(direct)["open_requests"] == 1)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        ended = await until(lambda: not (now := stats(direct))["open_requests"] and now)
        assert ended["requests"]["cancelled"] == cancelled + 1
    finally:
        engine.resume()


async def test_the_engines_death_goes_unnoticed(client: AsyncOpenAI, server: TritonServer, direct: Client) -> None:
    options = {**LONG, "max_tokens": 300, "temperature": 1.0, "seed": 11}
    expected = (await client.completions.create(**options)).choices[0].text

    async def text(first: threading.Event) -> str:
        found = ""
        async for chunk in await client.completions.create(stream=True, **options):
            found += chunk.choices[0].text
            first.set()
        return found

    async def is_interrupted() -> bool:
        engine, before, first = engine_process(server, "demo"), stats(direct), threading.Event()
        engine.suspend()
        reading = asyncio.create_task(text(first))
        await until(lambda: stats(direct)["open_requests"] == 1)
        await asyncio.to_thread(run_in_turns, engine, first.wait)
        was_open = await asyncio.to_thread(open_when_stopped, direct)
        engine.kill()
        assert await reading == expected
        now = await until(lambda: (now := stats(direct))["engine_deaths"] > before["engine_deaths"] and now)
        assert (now["engine_deaths"], now["replays"]) == (before["engine_deaths"] + 1, before["replays"] + was_open)
        with contextlib.suppress(psutil.NoSuchProcess):
            assert engine.status() == psutil.STATUS_ZOMBIE
        await until(lambda: engine_processes(server, "demo"))
        return was_open == 1

    for _ in tries():
        if await is_interrupted():
            return
    pytest.fail("the request had ended in every try")


# -- other APIs ------------------------------------------------------------------------------------------


async def lines_of(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url.removesuffix("/v1"), timeout=60) as http:
        response = await http.post(path, json={"model": "demo", **body})
        assert response.status_code == 200, response.text
        return [json.loads(line) for line in response.text.splitlines()]


async def test_ollamas_api_gives_the_models_text(url: str, direct: Client) -> None:
    limit: dict[str, Any] = {"num_predict": 24, "temperature": 0}
    expected = direct.generate(PROMPT, max_tokens=24, temperature=0)
    lines = await lines_of(url, "/api/generate", {"prompt": PROMPT, "raw": True, "options": limit})
    assert "".join(line["response"] for line in lines) == expected.text
    final = lines[-1]
    assert (final["done"], final["done_reason"], final["eval_count"]) == (
        *(True, expected.finish_reason, expected.usage.output_tokens),
    )
    assert final["prompt_eval_count"] == expected.usage.input_tokens
    assert 0 < final["prompt_eval_duration"] < final["total_duration"] and final["eval_duration"] > 0
    chat = [{"role": "user", "content": PROMPT}]
    (whole,) = await lines_of(url, "/api/chat", {"messages": chat, "options": limit, "stream": False})
    assert whole["message"]["content"] == direct.generate(messages=chat, max_tokens=24, temperature=0).text
    assert whole["eval_duration"] > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_gap_is_filled_with_the_operators_template(client: AsyncOpenAI, direct: Client, stream: bool) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logprobs": 1, "n": 2}
    expected = direct.generate(f"<|im_start|>{PROMPT}<|im_end|> x<|im_end|>", **options)
    made = await client.completions.create(model="demo", prompt=PROMPT, suffix=" x", stream=stream, **options)
    choices = [choice async for chunk in made for choice in chunk.choices] if stream else made.choices
    for index in range(2):
        mine = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in mine) == expected.choices[index].text
        assert len([token for choice in mine if choice.logprobs for token in choice.logprobs.tokens]) == (
            expected.choices[index].num_tokens
        )


async def test_a_page_whose_name_points_here_is_refused(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/models", headers={"Host": "evil.example"})).status_code == 403
        assert (await http.get("/models", headers={"Host": "localhost:1"})).status_code == 200


async def test_the_tokenizer_is_shown_without_paths(url: str) -> None:
    async with httpx.AsyncClient(base_url=url.removesuffix("/v1")) as http:
        shown = (await http.get("/tokenizer_info")).json()
    assert "im_start" in shown["chat_template"] and not re.search(r'": "/', json.dumps(shown))


async def test_the_page_shows_the_models_load(url: str, client: AsyncOpenAI, server: TritonServer) -> None:
    async def seen() -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=url.removesuffix("/v1"), verify=False) as http:
            found: dict[str, Any] = (await http.get("/page/status")).json()
        assert found["problem"] is None and [model["id"] for model in found["models"]] == ["demo"]
        (triton,) = found["tritons"]
        assert (triton["address"], triton["up"]) == (server.grpc_address, True)
        (model,) = triton["models"]
        assert (model["state"], model["reason"]) == ("ready", None)
        assert 0 <= model["kv_blocks_used"] < model["kv_blocks"]
        return dict(model)

    before = (await seen())["generation_tokens"]
    answer = await client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    while (await seen())["generation_tokens"] < before + 8:  # readers share an answer for a second
        await asyncio.sleep(0.1)
    assert (await seen())["prefix_queries"] > 0
