"""OpenAI's own Python package."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from asked import (
    ADAPTER,
    ASK_PERSON,
    ASK_WEATHER,
    BEST,
    CAPITAL,
    CHAT,
    DOCUMENTS,
    KEY,
    MODEL,
    NAMED,
    QUERY,
    RAIN,
    SECONDS,
    SIZE,
    TIME,
    URL,
    WEATHER,
    Person,
    Weather,
)
from openai import AsyncOpenAI, OpenAI

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=SECONDS) as client:
        yield client


class TestText:
    def test_a_chat(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(messages=CHAT, **GREEDY)
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop" and answer.model == MODEL

    def test_a_completion(self, client: OpenAI) -> None:
        answer = client.completions.create(prompt="The capital of France is", **GREEDY)
        assert "Paris" in answer.choices[0].text

    def test_the_list_of_models(self, client: OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [MODEL, ADAPTER]
        assert client.models.retrieve(MODEL).id == MODEL


class TestStreaming:
    def test_the_pieces_of_a_chat_are_the_whole_answer(self, client: OpenAI) -> None:
        whole = client.chat.completions.create(messages=RAIN, **GREEDY).choices[0]
        stream = client.chat.completions.create(messages=RAIN, stream=True, **GREEDY)
        chunks = [chunk.choices[0] for chunk in stream]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
        assert chunks[0].delta.role == "assistant" and chunks[-1].finish_reason == whole.finish_reason == "length"

    def test_the_helper_that_gathers_events(self, client: OpenAI) -> None:
        with client.chat.completions.stream(messages=CHAT, **GREEDY) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
            assert stream.get_final_completion().choices[0].message.content == text
        assert "Paris" in text

    def test_the_pieces_of_a_completion(self, client: OpenAI) -> None:
        whole = client.completions.create(prompt="Once upon a time", **GREEDY).choices[0].text
        stream = client.completions.create(prompt="Once upon a time", stream=True, **GREEDY)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole


class TestTools:
    def test_a_named_tool_there_and_back(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(
            messages=ASK_WEATHER, tools=[WEATHER, TIME], tool_choice=NAMED, **{**GREEDY, "max_tokens": 100}
        ).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.tool_calls is not None
        (call,) = answer.message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        assert Weather.model_validate_json(call.function.arguments).city == "Rome"
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        after = client.chat.completions.create(
            messages=[*ASK_WEATHER, answer.message, result], tools=[WEATHER], tool_choice="none", **GREEDY
        ).choices[0]
        assert after.message.content and not after.message.tool_calls

    def test_required(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(
            messages=ASK_WEATHER, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False,
            **{**GREEDY, "max_tokens": 100},
        ).choices[0]  # fmt: skip
        assert answer.finish_reason == "tool_calls" and answer.message.tool_calls is not None
        (call,) = answer.message.tool_calls
        assert call.type == "function" and call.function.name in ("weather", "now")

    def test_a_streamed_call_has_the_arguments_of_the_whole_one(self, client: OpenAI) -> None:
        asked: dict[str, Any] = {**GREEDY, "max_tokens": 100, "tools": [WEATHER], "tool_choice": NAMED}
        whole = client.chat.completions.create(messages=ASK_WEATHER, **asked).choices[0].message.tool_calls
        assert whole is not None and whole[0].type == "function"
        with client.chat.completions.stream(messages=ASK_WEATHER, **asked) as stream:
            pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        assert "".join(pieces) == whole[0].function.arguments

    def test_the_library_parses_the_arguments(self, client: OpenAI) -> None:
        answer = client.chat.completions.parse(
            messages=ASK_WEATHER, tools=[openai.pydantic_function_tool(Weather, name="weather")], tool_choice=NAMED,
            **{**GREEDY, "max_tokens": 100},
        ).choices[0]  # fmt: skip
        assert answer.message.tool_calls is not None
        assert isinstance(answer.message.tool_calls[0].function.parsed_arguments, Weather)


class TestStructuredOutput:
    def test_parse(self, client: OpenAI) -> None:
        answer = client.chat.completions.parse(
            messages=ASK_PERSON, response_format=Person, **{**GREEDY, "max_tokens": 200}
        )
        found = answer.choices[0].message.parsed
        assert found is not None and found.job == "baker" and found.age == 42

    def test_a_parsed_stream(self, client: OpenAI) -> None:
        with client.chat.completions.stream(
            messages=ASK_PERSON, response_format=Person, **{**GREEDY, "max_tokens": 200}
        ) as stream:
            found = stream.get_final_completion().choices[0].message.parsed
        assert isinstance(found, Person)

    def test_any_object(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(
            messages=ASK_PERSON, response_format={"type": "json_object"}, **{**GREEDY, "max_tokens": 60}
        ).choices[0]
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.message.content or ""), dict)
        assert (answer.message.content or "").lstrip().startswith("{")


class TestSampling:
    def test_seeds_repeat_and_differ(self, client: OpenAI) -> None:
        def text(seed: int) -> str:
            answer = client.chat.completions.create(model=MODEL, messages=RAIN, max_tokens=16, temperature=1, seed=seed)
            return answer.choices[0].message.content or ""

        assert text(1) == text(1) != text(2)

    def test_two_choices(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=RAIN, max_tokens=16, temperature=1, seed=1, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[0].message.content != answer.choices[1].message.content

    def test_a_stop_string_is_left_out(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(messages=CHAT, stop=[" is"], **GREEDY).choices[0]
        assert answer.message.content == "The capital of France" and answer.finish_reason == "stop"

    def test_a_bias_excludes_a_token(self, client: OpenAI) -> None:
        greedy = client.chat.completions.create(messages=CHAT, logprobs=True, **GREEDY).choices[0]
        assert greedy.message.content == "The capital of France is Paris."
        first = client.post(
            "/../tokenize", cast_to=object, body={"model": MODEL, "prompt": "The", "add_special_tokens": False}
        )
        bias = {str(first["tokens"][0]): -100}  # type: ignore[index]
        answer = client.chat.completions.create(messages=CHAT, logit_bias=bias, **GREEDY)
        assert not (answer.choices[0].message.content or "").startswith("The ")


class TestLogProbabilities:
    def test_of_a_chat(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY).choices[0]
        assert answer.logprobs is not None and answer.logprobs.content is not None
        for token in answer.logprobs.content:
            assert len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token  # greedy
            assert token.logprob == token.top_logprobs[0].logprob <= 0
            assert sum(math.exp(one.logprob) for one in token.top_logprobs) <= 1.001
        text = b"".join(bytes(token.bytes or []) for token in answer.logprobs.content).decode()
        assert text.removesuffix("<|im_end|>") == answer.message.content

    def test_of_a_completion(self, client: OpenAI) -> None:
        answer = client.completions.create(prompt="The capital of France is", logprobs=2, echo=True, **GREEDY)
        found = answer.choices[0].logprobs
        assert found is not None and found.token_logprobs is not None and found.tokens is not None
        assert found.token_logprobs[0] is None and len(found.tokens) == len(found.token_logprobs)


class TestUsage:
    def test_it_adds_up(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(messages=CHAT, logprobs=True, **GREEDY)
        usage, logprobs = answer.usage, answer.choices[0].logprobs
        assert usage is not None and logprobs is not None and logprobs.content is not None
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.completion_tokens - len(logprobs.content) in (0, 1)  # the token that ends it
        stream = client.chat.completions.create(
            messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        *_, last = stream
        assert last.choices == [] and last.usage is not None
        assert last.usage.completion_tokens == usage.completion_tokens
        assert last.usage.prompt_tokens == usage.prompt_tokens


class TestErrors:
    def test_they_become_the_exceptions_of_the_library(self, client: OpenAI) -> None:
        ask = client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as unknown:
            ask(model="gpt-4", messages=CHAT)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.BadRequestError) as wrong:
            ask(**{**GREEDY, "temperature": -1}, messages=CHAT)
        assert "temperature" in wrong.value.message
        with pytest.raises(openai.BadRequestError) as long:
            ask(messages=[{"role": "user", "content": "rain " * 6000}], stream=True, **GREEDY)
        assert "4096" in long.value.message

    def test_no_connection(self) -> None:
        with (
            OpenAI(base_url="http://127.0.0.1:9/v1", api_key=KEY, max_retries=0) as lost,
            pytest.raises(openai.APIConnectionError),
        ):
            lost.models.list()

    def test_an_answer_that_is_cut_off_is_not_parsed(self, client: OpenAI) -> None:
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(messages=ASK_PERSON, response_format=Person, **{**GREEDY, "max_tokens": 3})


class TestCancellation:
    def test_a_timeout_raises_and_frees_the_request(self, client: OpenAI) -> None:
        endless: dict[str, Any] = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=1.0).chat.completions.create(model=MODEL, messages=RAIN, **endless)
        with client.chat.completions.create(model=MODEL, messages=RAIN, stream=True, **endless) as stream:
            next(iter(stream))
        _until_idle(client)

    async def test_a_cancelled_task_frees_the_request(self, client: OpenAI) -> None:
        async with AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=SECONDS) as several:
            stream = await several.chat.completions.create(
                model=MODEL, messages=RAIN, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
            )
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in stream:
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await stream.close()
        await asyncio.to_thread(_until_idle, client)


def _until_idle(client: OpenAI) -> None:
    """Until no request generates: the gateway counts them.  The test's limit of time ends it."""
    name = "inflight_gateway_open_requests "
    while True:
        text = client.with_options(timeout=SECONDS).get("/../metrics", cast_to=str)
        (value,) = [float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)]
        if value == 0:
            return
        time.sleep(0.1)


class TestAsync:
    async def test_four_streams_side_by_side(self) -> None:
        async with AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=SECONDS) as client:

            async def text(stream: bool) -> str:
                answer: Any = await client.chat.completions.create(messages=CHAT, stream=stream, **GREEDY)
                if not stream:
                    return str(answer.choices[0].message.content)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

            texts = await asyncio.gather(*(text(stream) for stream in (True, False, True, False)))
        assert set(texts) == {"The capital of France is Paris."}


RESPONSE: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}


class TestResponses:
    def test_text_whole_and_streamed(self, client: OpenAI) -> None:
        whole = client.responses.create(input=CAPITAL, **RESPONSE)
        assert whole.output_text == "The capital of France is Paris." and whole.status == "completed"
        assert whole.usage is not None
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        with client.responses.stream(input=CAPITAL, **RESPONSE) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            assert stream.get_final_response().output_text == text == whole.output_text

    def test_parse(self, client: OpenAI) -> None:
        asked = {**RESPONSE, "max_output_tokens": 200}
        answer = client.responses.parse(input=ASK_PERSON[0]["content"], text_format=Person, **asked)
        assert answer.output_parsed is not None and answer.output_parsed.job == "baker"

    def test_a_tool_there_and_back(self, client: OpenAI) -> None:
        tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
        asked: dict[str, Any] = {**RESPONSE, "tools": [tool], "max_output_tokens": 100}
        named: Any = {"type": "function", "name": "weather"}
        answer = client.responses.create(input=ASK_WEATHER, tool_choice=named, **asked)
        (call,) = [item for item in answer.output if item.type == "function_call"]
        assert Weather.model_validate_json(call.arguments).city == "Rome"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        after = client.responses.create(input=[*ASK_WEATHER, call, result], tool_choice="none", **asked)
        assert after.output_text

    def test_what_is_stored_elsewhere_is_refused(self, client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(input=CAPITAL, previous_response_id="resp_1", **RESPONSE)
        assert refused.value.param == "previous_response_id"


class TestEmbeddings:
    def test_a_list_in_base64_and_as_numbers(self, client: OpenAI) -> None:
        answer = client.embeddings.create(model=MODEL, input=[QUERY, *DOCUMENTS])  # the package asks for base64
        vectors = [item.embedding for item in answer.data]
        assert [item.index for item in answer.data] == [0, 1, 2, 3] and answer.model == MODEL
        assert all(len(vector) == SIZE and math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in vectors)
        assert vectors[0] == vectors[1 + BEST] and answer.usage.prompt_tokens == answer.usage.total_tokens > 0
        plain = client.embeddings.create(model=MODEL, input=QUERY, encoding_format="float")
        assert plain.data[0].embedding == pytest.approx(vectors[0], abs=1e-6)

    def test_token_ids(self, client: OpenAI) -> None:
        vectors = client.embeddings.create(model=MODEL, input=[[504, 3575], [504]]).data
        alone = client.embeddings.create(model=MODEL, input=[504, 3575]).data
        assert len(vectors) == 2 and alone[0].embedding == vectors[0].embedding

    def test_what_the_model_cannot_do_is_said(self, client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model=MODEL, input=QUERY, dimensions=64)
        with pytest.raises(openai.BadRequestError, match="input"):
            client.embeddings.create(model=MODEL, input=["a text", ""])

    def test_asynchronously_beside_chats(self) -> None:
        async def both() -> Any:
            async with AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=SECONDS) as client:
                return await asyncio.gather(
                    client.embeddings.create(model=MODEL, input=DOCUMENTS),
                    client.chat.completions.create(messages=CHAT, **GREEDY),
                )

        vectors, chat = asyncio.run(both())
        assert len(vectors.data) == len(DOCUMENTS)
        assert chat.choices[0].message.content == "The capital of France is Paris."


class TestAdapters:
    def test_by_the_name_of_a_model(self, client: OpenAI) -> None:
        asked = {**GREEDY, "model": ADAPTER, "messages": RAIN, "max_tokens": 8}
        dressed = client.chat.completions.create(**asked)
        base = client.chat.completions.create(**{**asked, "model": MODEL})
        assert dressed.model == ADAPTER and client.models.retrieve(ADAPTER).id == ADAPTER
        assert dressed.choices[0].message.content != base.choices[0].message.content
        pieces = client.chat.completions.create(stream=True, **asked)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == dressed.choices[0].message.content

    def test_embeddings(self, client: OpenAI) -> None:
        dressed, base = (client.embeddings.create(model=name, input=QUERY) for name in (ADAPTER, MODEL))
        assert dressed.data[0].embedding != pytest.approx(base.data[0].embedding, abs=1e-3)
