"""Chats with options and a gateway's other questions to a model, through a real server with the demo model."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frontend_rig import CHECKPOINT
from nightly import nightly_but
from processes_of import engine_processes

import inflight
from inflight_client import AsyncClient, Client, InvalidRequestError
from inflight_client.request import GenerationRequest
from inflight_tools.launcher import TritonServer

CHAT = [{"role": "user", "content": "héllo"}, {"role": "assistant", "content": "Return the "}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(params=["grpc", "http"])
def client(server: TritonServer, request: pytest.FixtureRequest) -> Iterator[Client]:
    address = server.grpc_address if request.param == "grpc" else server.http_address
    with Client(address, protocol=request.param, model="demo") as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_file=str(CHECKPOINT / "tokenizer.json"), bos_token="<|endoftext|>")
    made.chat_template = Path(CHECKPOINT / "chat_template.jinja").read_text()
    return made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"tools": TOOLS, "chat_template_kwargs": {"bos_token": "<|im_end|>"}, "continue_final_message": True},
    ],
)
def test_a_chat_becomes_the_prompt_that_transformers_makes(
    client: Client, tokenizer: Any, options: dict[str, Any]
) -> None:
    said = {"add_generation_prompt": not options} | {k: v for k, v in options.items() if k != "chat_template_kwargs"}
    ids = tokenizer.apply_chat_template(CHAT, return_dict=False, **said, **options.get("chat_template_kwargs", {}))
    wanted = client.generate(input_ids=ids, max_tokens=3, temperature=0)
    result = client.generate(messages=CHAT, max_tokens=3, temperature=0, **options)
    assert (result.token_ids, result.usage.input_tokens) == (wanted.token_ids, len(ids))


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"one_response": True}])
def test_cached_tokens_are_counted(client: Client, options: dict[str, Any]) -> None:
    # Another salt, another cache: a prompt is new to it.
    request = {"input_ids": list(range(100, 180)), "max_tokens": 2, "cache_salt": str(uuid.uuid4()), **options}
    cached = [client.generate(**request, return_num_cached_tokens=True).usage.cached_tokens for _ in range(2)]
    assert cached == [0, 64]
    assert client.generate(**request).usage.cached_tokens is None


def test_tokens_of_a_text_and_back(client: Client, tokenizer: Any) -> None:
    text = "the list: héllo 你好 🙂"
    answer = client.tokenize(text, add_special_tokens=False, return_token_strs=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert answer == {
        "count": len(ids),
        "max_model_len": 2048,
        "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids),
    }
    assert client.detokenize(ids) == text
    assert client.detokenize(ids[:1]) == tokenizer.decode(ids[:1])
    assert client.detokenize([]) == ""
    assert client.tokenize(text)["count"] == client.generate(text, max_tokens=1).usage.input_tokens


@pytest.mark.parametrize(
    "options", [{}, {"continue_final_message": True}, {"tools": TOOLS, "add_generation_prompt": False}]
)
def test_tokens_of_a_chat_are_its_prompt(client: Client, options: dict[str, Any]) -> None:
    answer = client.tokenize(messages=CHAT, **options)
    assert answer["count"] == client.generate(messages=CHAT, max_tokens=1, **options).usage.input_tokens


def test_facts_about_the_model(client: Client, tokenizer: Any) -> None:
    info = client.model_info()
    assert len(info.pop("checkpoint_id")) == 16
    assert info == {
        "version": inflight.__version__,
        "max_model_len": 2048,
        "vocab_size": 2560,
        "has_chat_template": True,
        "takes_tools": False,
        "tool_format": None,
        "reasoning_tags": None,
        "reasoning_opened": False,
        "reasoning_token_ids": None,
        "fim_template": None,
        "fim_stop_token_ids": [],
        "special_tokens": {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
        "generates": True,
        "pooling_tasks": ["embed", "score"],
        "embedding_size": 256,
        "labels": [],
        "adapters": None,
    }


def test_each_response_names_its_checkpoint_if_it_is_asked_to(client: Client) -> None:
    for asks, named in [(True, client.model_info()["checkpoint_id"]), (False, None)]:
        request = GenerationRequest("demo", prompt="a", sampling={"max_tokens": 5}, return_checkpoint_id=asks)
        chunks = list(client.send(request))
        assert {chunk.checkpoint_id for chunk in chunks if chunk.choices[0].num_tokens} == {named}


def test_long_texts_are_answered_by_threads(client: Client, tokenizer: Any) -> None:
    text = "the list of names " * 1000
    ids = client.tokenize(text)["tokens"]
    assert ids == tokenizer.encode(text)
    assert client.detokenize(ids).endswith(text)


def test_an_engine_that_hangs_delays_no_answer(server: TritonServer) -> None:
    engines = engine_processes(server, "demo")
    with Client(server.grpc_address, model="demo") as client:
        for engine in engines:
            engine.suspend()
        try:
            assert client.detokenize(client.tokenize("a", add_special_tokens=False)["tokens"]) == "a"
            assert client.tokenize(messages=CHAT)["count"] > 0
            assert client.model_info()["vocab_size"] == 2560
        finally:
            for engine in engines:
                engine.resume()


def test_errors_name_their_cause(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="token id 2560 is not in the vocabulary"):
        client.detokenize([5, 2560])
    with pytest.raises(InvalidRequestError, match=r"control='tokenise': must be .* or \"model\""):
        client.control("tokenise")


# tests/client/test_client_async.py has these with a scripted model.
@pytest.mark.parametrize(
    "options",
    nightly_but(
        [{}, {"n": 3, "one_response": True}], [{}, {"one_response": True}, {"n": 3}, {"n": 3, "one_response": True}]
    ),
)
async def test_a_task_that_is_cancelled_cancels_its_request(server: TritonServer, options: dict[str, Any]) -> None:
    async def frontend() -> dict[str, Any]:
        told: dict[str, Any] = json.loads(await client.control("stats"))["frontend"]
        return told

    async with AsyncClient(server.grpc_address, model="demo") as client:
        before = (await frontend())["requests"].get("cancelled", 0)
        engines = engine_processes(server, "demo")
        for engine in engines:
            engine.suspend()  # it cannot finish the request meanwhile
        try:
            chat: Any = [{"role": "user", "content": "hi"}]
            task = asyncio.create_task(client.generate(messages=chat, max_tokens=500, ignore_eos=True, **options))
            while (await frontend())["open_requests"] == 0:
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while (await frontend())["open_requests"]:
                await asyncio.sleep(0.02)
        finally:
            for engine in engines:
                engine.resume()
        assert (await frontend())["requests"]["cancelled"] == before + 1


async def test_asyncio_asks_the_same(server: TritonServer) -> None:
    async with AsyncClient(server.grpc_address, model="demo") as client:
        ids = (await client.tokenize("héllo"))["tokens"]
        assert await client.detokenize(ids[1:]) == "héllo"
        assert (await client.model_info())["max_model_len"] == 2048
