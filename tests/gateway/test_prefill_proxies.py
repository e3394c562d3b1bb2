"""Requests of proxies that have one server compute a prompt and another one generate: vLLM's, vllm-router, llm-d's."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from scripted_client import ScriptedClient, text

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
}
FORMS = {CHAT: ChatCompletion, COMPLETIONS: Completion, RESPONSES: Response}
NOWHERE = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, **NOWHERE}
ANSWERED = {"do_remote_decode": False, "do_remote_prefill": True, **NOWHERE}
# As they send the prompt: what they add to a request.
PREFILLS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "vLLM, toy_proxy_server": ([CHAT, COMPLETIONS], {"stream": False, "max_tokens": 1, "kv_transfer_params": ASKED}),
    "vllm-router 0.1.17": (
        [CHAT, COMPLETIONS],
        {"stream": False, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": ASKED},
    ),
    "vllm-router 0.1.17, responses": (
        [RESPONSES],
        {"stream": False, "max_output_tokens": 1, "kv_transfer_params": ASKED},
    ),
    "vllm-router 0.1.17, mooncake": (
        [CHAT, COMPLETIONS],
        {
            "stream": False,
            "max_tokens": 1,
            "min_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"},
        },
    ),
    "llm-d, nixlv2": (
        [CHAT, COMPLETIONS],
        {
            "stream": False,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "min_tokens": 1,
            "kv_transfer_params": ASKED,
        },
    ),
}


def ok(request: Any) -> Any:
    return text("a", n=request.n, finish="length")


@pytest.mark.parametrize(("path", "name"), [(path, name) for name, (paths, _) in PREFILLS.items() for path in paths])
async def test_a_prompt_that_another_server_continues(start: Any, path: str, name: str) -> None:
    front = await start(ok, strict=True)
    response = await front.post(path, {"model": "demo", **BODIES[path], **PREFILLS[name][1]})
    assert response.status_code == 200 and "x-inflight-warning" not in response.headers
    answer = response.json()
    assert answer.pop("kv_transfer_params") == ANSWERED
    FORMS[path].model_validate(answer, strict=False)
    assert front.client.requests[-1].sampling["max_tokens"] == 1


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("stream", [False, True])
async def test_the_rest_of_it(start: Any, path: str, stream: bool) -> None:
    """With addresses that some clients make up: none of them gets a connection, or reaches Triton."""
    front = await start(ok, strict=True)
    plain = {"model": "demo", **BODIES[path], "stream": stream}
    await front.post(path, plain)
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        theirs.setblocking(False)
        address = {"remote_host": "127.0.0.1", "remote_port": theirs.getsockname()[1]}
        hostile = {
            **ANSWERED,
            **address,
            "remote_block_ids": [[1, 2], ["x"]],
            "remote_hosts": [f"http://127.0.0.1:{address['remote_port']}/"],
            "transfer_mode": "push",
        }
        for given in (ANSWERED, hostile, {}, {"remote_prefiller": {"kv_request_id": "1", **address}}):
            response = await front.post(path, {**plain, "kv_transfer_params": given})
            assert response.status_code == 200 and "x-inflight-warning" not in response.headers
            assert "kv_transfer_params" not in response.text and "127.0.0.1" not in response.text
            first, last = front.client.requests[0], front.client.requests[-1]
            assert (last.sampling, last.chat, last.resume_token_ids) == (first.sampling, first.chat, None)
        with pytest.raises(BlockingIOError):  # no connection waits
            theirs.accept()


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_a_stream_has_no_parameters(start: Any, path: str) -> None:
    """As in vLLM; the proxies ask for whole answers."""
    front = await start(ok)
    body = {"model": "demo", **BODIES[path], "stream": True, "kv_transfer_params": ASKED}
    response = await front.post(path, body)
    assert response.status_code == 200 and "kv_transfer_params" not in response.text


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("given", ["x", 1, [ASKED], {"do_remote_decode": {}}, {"do_remote_prefill": "often"}])
async def test_what_are_no_parameters(start: Any, path: str, given: Any) -> None:
    front = await start(ok)
    response = await front.post(path, {"model": "demo", **BODIES[path], "kv_transfer_params": given})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("kv_transfer_params")
    assert not front.client.requests


async def test_a_prompt_for_another_server_is_not_handed_over(start: Any) -> None:
    """A gateway with Tritons for prompts of its own behind such a proxy."""
    prefill = ScriptedClient(ok)
    front = await start(ok, prefills=[prefill], handover="0", prefill_triton=("p0:1",))
    body = {"model": "demo", "prompt": "Hi " * 2000, "max_tokens": 1, "kv_transfer_params": ASKED}
    response = await front.post(COMPLETIONS, body)
    assert response.json()["kv_transfer_params"] == ANSWERED
    assert not prefill.requests and len(front.client.requests) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_belongs_to_the_whole_answer(start: Any, path: str) -> None:
    """vLLM's proxies leave some of it in the request for the prompt."""
    front = await start(ok, strict=True)
    left = {"min_tokens": 9, "stream_options": {"include_usage": True}}
    body = {"model": "demo", **BODIES[path], **left, "stream": False, "max_tokens": 1, "kv_transfer_params": ASKED}
    response = await front.post(path, body)
    assert response.status_code == 200 and response.json()["kv_transfer_params"] == ANSWERED
    assert front.client.requests[-1].sampling["min_tokens"] == 1
    for params in ({}, ANSWERED):
        assert (await front.post(path, {**body, "kv_transfer_params": params})).status_code == 400
    for stream in (True, "true"):
        streamed = await front.post(path, {**body, "stream": stream, "max_tokens": 12})
        assert streamed.status_code == 200 and '"usage":{' in streamed.text
        assert front.client.requests[-1].sampling["min_tokens"] == 9


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("true", ["true", "True", "1", 1])
async def test_a_prompt_for_another_server_in_other_spellings(start: Any, path: str, true: Any) -> None:
    """Numbers and booleans of a body can be strings."""
    front = await start(ok, strict=True)
    left = {"min_tokens": "9", "max_tokens": "1", "stream_options": {"include_usage": True}, "stream": "false"}
    body = {"model": "demo", **BODIES[path], **left, "kv_transfer_params": {"do_remote_decode": true}}
    response = await front.post(path, body)
    assert response.status_code == 200 and response.json()["kv_transfer_params"] == ANSWERED
    assert front.client.requests[-1].sampling["min_tokens"] == 1
    assert (await front.post(path, {**body, "kv_transfer_params": {"do_remote_decode": "false"}})).status_code == 400


async def test_llm_ds_shared_storage(start: Any) -> None:
    """Its prompt, and the rest: with neither parameters nor a threshold that counts."""
    front = await start(ok, strict=True)
    for path in (CHAT, COMPLETIONS):
        sent = {"max_tokens": 1, "max_completion_tokens": 1, "cache_hit_threshold": 0}
        for more in (sent, {"cache_hit_threshold": 0}):
            response = await front.post(path, {"model": "demo", **BODIES[path], **more})
            assert response.status_code == 200 and "x-inflight-warning" not in response.headers
            assert "kv_transfer_params" not in response.json()
