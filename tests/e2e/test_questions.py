"""Chats with options, and what else a gateway asks of a model, through a real server with the demo model."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frontend_rig import CHECKPOINT

from inflight_client import Client
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
