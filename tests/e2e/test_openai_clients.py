"""OpenAI's own client library against a gateway in front of a real tritonserver with the demo model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from hostile_bodies import bodies, check_answer, encoded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import nightly_but
from openai import AsyncOpenAI, OpenAI
from processes_of import begins_in_turns, engine_process, open_when_stopped, tries
from pydantic import BaseModel, Field

from inflight_client import Client
from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.gateway_process import GatewayProcess
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

KEY, MAX_OPEN = "key-of-the-test", 4
CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Return a list of"}]
LONG: dict[str, Any] = {"model": "demo", "messages": CHAT, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}}},
]


@pytest.fixture(scope="module")
def url(server: TritonServer) -> Iterator[str]:
    """A gateway's `base_url`."""
    (port,) = pick_ports(1)
    options = GatewayOptions(api_keys=(KEY,), tool_call_parser="hermes", max_open_requests=MAX_OPEN)
    gateway = GatewayProcess(options, ServerOptions(port=port, exit_timeout=2))
    gateway.start(server.grpc_address)
    yield gateway.url
    gateway.stop()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def direct(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_address) as client:
        yield client


def stats(direct: Client) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(direct.control("stats"))["frontend"]
    return found


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("n", [1, 2])
def test_a_chat_whole_and_streamed_is_that_of_triton(client: OpenAI, direct: Client, n: int) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "seed": 3, "n": n}
    wanted = direct.generate(messages=CHAT, **options)
    whole = client.chat.completions.create(model="demo", messages=CHAT, logprobs=True, top_logprobs=2, **options)
    assert [choice.message.content for choice in whole.choices] == [choice.text for choice in wanted.choices]
    assert whole.usage is not None and whole.usage.completion_tokens == wanted.usage.output_tokens
    assert whole.usage.prompt_tokens == wanted.usage.input_tokens
    stream = client.chat.completions.create(
        model="demo", messages=CHAT, logprobs=True, top_logprobs=2, stream=True,
        stream_options={"include_usage": True}, **options,
    )  # fmt: skip
    texts, tokens, reasons = [""] * n, [0] * n, [None] * n
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len((choice.logprobs and choice.logprobs.content) or ())
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = chunk.usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices] and usage == whole.usage
    for choice, count in zip(whole.choices, tokens):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert count == len(choice.logprobs.content) and all(
            len(one.top_logprobs) == 2 for one in choice.logprobs.content
        )


def test_headers_of_the_raw_response(client: OpenAI) -> None:
    asked = {"X-Request-Id": "my-request"}
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=CHAT, max_tokens=1, extra_headers=asked
    )
    assert raw.headers["x-request-id"] == "my-request" and raw.parse().id == "chatcmpl-my-request"
    assert raw.headers["content-type"] == "application/json"
    answer = client.completions.create(model="demo", prompt="a", max_tokens=1)
    assert answer._request_id and answer.id == f"cmpl-{answer._request_id}"
    with client.chat.completions.with_streaming_response.create(**LONG, stream=True) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")


def test_errors_become_the_exceptions_of_the_library(client: OpenAI) -> None:
    ask = client.chat.completions.create
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=CHAT, max_tokens=1, extra_body={"temperatur": 1}
    )
    assert "unknown parameter 'temperatur' was ignored" in raw.headers["x-inflight-warning"]
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(model="demo", messages=CHAT, extra_body={"suffix": "x", "use_beam_search": True})
    assert (wrong.value.param, wrong.value.code) == ("use_beam_search", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as mistyped:  # never 422
        ask(model="demo", messages=CHAT, temperature="warm")  # type: ignore[call-overload]
    assert mistyped.value.param == "temperature" and mistyped.value.status_code == 400
    with pytest.raises(openai.BadRequestError) as refused:  # by the backend, before anything was streamed
        ask(model="demo", messages=CHAT, stream=True, temperature=-1.0)
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError) as denied:
        client.with_options(api_key="wrong").models.list()
    assert denied.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(model="gpt-4", messages=CHAT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as absent:
        client.images.generate(model="demo", prompt="a")
    assert absent.value.code == "unsupported_endpoint"


async def test_more_requests_than_the_gateway_takes_are_rate_limited(
    url: str, server: TritonServer, direct: Client
) -> None:
    engine = engine_process(server, "demo")
    engine.suspend()  # so that none of them can end by itself
    try:
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            tasks = [asyncio.create_task(client.chat.completions.create(**LONG)) for _ in range(MAX_OPEN)]
            while stats(direct)["open_requests"] < MAX_OPEN:
                await asyncio.sleep(0.02)
            with pytest.raises(openai.RateLimitError) as limited:
                await client.chat.completions.create(**LONG)
            assert limited.value.code == "too_many_requests" and limited.value.response.headers["retry-after"] == "1"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while stats(direct)["open_requests"]:
                await asyncio.sleep(0.02)
    finally:
        engine.resume()


@pytest.mark.parametrize("how", nightly_but(["close"], ["close", "timeout"]))
def test_leaving_a_request_frees_it_at_the_backend(
    client: OpenAI, direct: Client, server: TritonServer, how: str
) -> None:
    engine = engine_process(server, "demo")

    def leave() -> bool:
        """Returns whether the request had reached the backend, and had not ended, when its client left it."""
        cancelled = stats(direct)["requests"].get("cancelled", 0)
        try:
            if how == "close":
                with contextlib.ExitStack() as ends:
                    with begins_in_turns(engine) as begun:
                        stream = ends.enter_context(client.chat.completions.create(stream=True, **LONG))
                        next(iter(stream))
                        begun.set()
                    was_open = open_when_stopped(direct)  # and cannot end by itself any more
            else:
                engine.suspend()
                with pytest.raises(openai.APITimeoutError):
                    client.with_options(timeout=2.0).chat.completions.create(**LONG)
            until(lambda: stats(direct)["open_requests"] == 0)
            num_cancelled = stats(direct)["requests"].get("cancelled", 0) - cancelled
            assert how == "timeout" or num_cancelled == was_open  # it may not have come within two seconds
            return num_cancelled == 1
        finally:
            engine.resume()

    assert any(leave() for _ in tries())


class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]
    nights: int = Field(ge=1, le=14)
    notes: list[Annotated[str, Field(max_length=8)]] = Field(max_length=2)
    code: str = Field(pattern="^[A-Z]{2}[0-9]$")


def test_parse_returns_a_valid_model_whatever_the_model_writes(client: OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="demo", messages=CHAT, response_format=Trip, max_tokens=900, temperature=1.5, seed=seed
        )
        assert isinstance(answer.choices[0].message.parsed, Trip)


def test_tools_there_and_back(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "tools": TOOLS, "max_tokens": 400, "temperature": 1.0, "seed": 4}
    answer = client.chat.completions.create(
        messages=CHAT, tool_choice="required", parallel_tool_calls=False, **asked
    ).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.function.name in ("weather", "now")
    assert isinstance(json.loads(call.function.arguments), dict)
    history = [*CHAT, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    after = client.chat.completions.create(messages=history, tool_choice="none", **{**asked, "max_tokens": 4})
    assert after.choices[0].message.tool_calls is None and after.choices[0].finish_reason == "length"


def test_a_named_tool_is_called_in_pieces(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=CHAT, tools=TOOLS, max_tokens=400, seed=1,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    ) as stream:  # fmt: skip
        arguments = "".join(one.arguments_delta for one in stream if one.type == "tool_calls.function.arguments.delta")
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and call.function.arguments == arguments
    found = json.loads(arguments)
    assert found["city"] in ("Oslo", "Rome") and 1 <= found["days"] <= 9


def test_responses_whole_streamed_and_parsed(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "input": "Return a list of",
        "max_output_tokens": 8,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.responses.create(instructions="Be brief.", temperature=0, **asked)
    assert whole.status == "incomplete" and whole.output_text and whole.usage is not None
    with client.responses.stream(instructions="Be brief.", temperature=0, **asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    parsed = client.responses.parse(model="demo", input="Hi", text_format=Trip, temperature=1.5, max_output_tokens=900)
    assert isinstance(parsed.output_parsed, Trip)


async def test_the_async_client_streams_side_by_side(url: str, direct: Client) -> None:
    async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:

        async def text(seed: int) -> str:
            stream = await client.chat.completions.create(
                model="demo", messages=CHAT, max_tokens=10, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*map(text, range(MAX_OPEN)))
    wanted = [direct.generate(messages=CHAT, max_tokens=10, seed=seed).text for seed in range(MAX_OPEN)]
    assert texts == wanted


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), path=st.sampled_from(["/chat/completions", "/completions", "/responses"]))
def test_no_body_is_answered_with_an_error_of_the_server(http: httpx.Client, data: Any, path: str) -> None:
    body = data.draw(bodies(path))
    check_answer(http.post(path, content=encoded(body)))
