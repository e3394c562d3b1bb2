"""Endpoints beside OpenAI's that balancers, SageMaker and clients of vLLM ask for."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import pytest
from scripted_client import ScriptedClient, text

from inflight_client import UnavailableError
from inflight_gateway.options import GatewayOptions

HI = [{"role": "user", "content": "Hi"}]


def ok(request):
    return text("a", n=request.n)


@pytest.mark.parametrize(("method", "path"), [("GET", "/health/ready"), ("GET", "/ping"), ("POST", "/ping")])
async def test_readiness_has_several_names(start, method, path):
    front = await start(ok, api_keys=("key",))
    assert (await front.http.request(method, path)).status_code == 200, "without a key"
    front.client.is_silent = True
    assert (await front.http.request(method, path)).status_code == 503
    assert (await front.http.request("DELETE", path)).status_code in (401, 405)


async def test_the_version_is_that_of_the_distribution(start):
    front = await start(ok)
    assert (await front.http.get("/version")).json() == {"version": version("triton-inflight")}
    assert (await front.http.get("/api/version")).json()["inflight"] == version("triton-inflight")


async def test_a_models_card_has_vllms_keys(start):
    front = await start(ok)
    (card,) = (await front.http.get("/v1/models")).json()["data"]
    assert card["root"] == card["id"] == "demo" and card["parent"] is None
    (permission,) = card["permission"]
    assert permission["object"] == "model_permission" and permission["allow_sampling"] is True
    assert permission["allow_fine_tuning"] is False and permission["organization"] == "*"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": HI}, "chat.completion"),
        ({"prompt": "a"}, "text_completion"),
        ({"messages": HI, "prompt": "a"}, "chat.completion"),
    ],
)
async def test_an_invocation_is_a_chat_or_a_completion(start, body, kind):
    front = await start(ok)
    assert (await front.post("/invocations", body)).json()["object"] == kind
    streamed = await front.post("/invocations", {**body, "stream": True})
    assert kind in streamed.text and streamed.text.endswith("data: [DONE]\n\n")


async def test_an_invocation_that_is_neither_is_refused(start):
    front = await start(ok, api_keys=("key",), max_body_bytes=100)
    assert (await front.post("/invocations", {"prompt": "a"})).status_code == 401
    key = {"Authorization": "Bearer key"}
    for body, param in (({}, "messages"), ({"input": "a"}, "messages"), ({"prompt": 5}, "prompt")):
        refused = await front.post("/invocations", body, headers=key)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    for content in (b"", b"[", b"[]", b'"\xff"', b'{"prompt": "\xff"}'):
        refused = await front.http.post("/invocations", content=content, headers=key)
        assert refused.status_code == 400 and "JSON" in refused.json()["error"]["message"]
    assert (await front.post("/invocations", {"prompt": "a" * 100}, headers=key)).status_code == 413


async def test_the_load_counts_what_generates(start):
    go_on = asyncio.Event()
    front = await start(lambda request: [go_on, *text("a")], api_keys=("key",))
    assert (await front.http.get("/load")).status_code == 401
    key = {"Authorization": "Bearer key"}
    assert (await front.http.get("/load", headers=key)).json() == {"server_load": 0}
    sent = [asyncio.create_task(front.post("/v1/completions", {"prompt": "a"}, headers=key)) for _ in range(2)]
    while (await front.http.get("/load", headers=key)).json() != {"server_load": 2}:
        assert not any(task.done() for task in sent)
    go_on.set()
    await asyncio.gather(*sent)
    assert (await front.http.get("/load", headers=key)).json() == {"server_load": 0}


async def test_the_load_can_be_open(start):
    front = await start(ok, api_keys=("key",), open_metrics=True)
    assert (await front.http.get("/load")).json() == {"server_load": 0}


async def test_the_tokenizer_is_shown_only_if_the_operator_says_so(start):
    closed = await (await start(ok)).http.get("/tokenizer_info")
    assert closed.status_code == 404 and "--enable-tokenizer-info-endpoint" in closed.json()["error"]["message"]
    client = ScriptedClient(ok, models=("a", "b", "other"))
    client.inputs["other"] = tuple(name for name in client.inputs["other"] if name != "resume_token_ids")
    front = await start(client, enable_tokenizer_info_endpoint=True)
    assert (await front.http.get("/tokenizer_info")).status_code == 400, "which of them?"
    assert (await front.http.get("/tokenizer_info?model=x")).status_code == 404
    assert (await front.http.get("/tokenizer_info?model=other")).status_code == 400
    assert (await front.http.get("/tokenizer_info?model=b")).json() == {
        "tokenizer_class": "Toy",
        "bos_token": "<s>",
        "chat_template": "{{ messages }}",
    }


# -- fill-in-the-middle ------------------------------------------------------------------------------

FIM = {"fim_template": "<PRE>{prefix}<SUF>{suffix}<MID>", "fim_stop_token_ids": [40, 41]}


async def test_a_suffix_makes_a_prompt_with_a_gap(start):
    front = await start(ok)
    front.client.info.update(FIM)
    body = {"prompt": ["a{suffix}", "b"], "suffix": "c{prefix}", "n": 2, "logprobs": 1, "stop_token_ids": [7, 40]}
    answer = await front.post("/v1/completions", body)
    assert len(answer.json()["choices"]) == 4
    assert [request.prompt for request in front.client.requests] == [
        "<PRE>a{suffix}<SUF>c{prefix}<MID>",
        "<PRE>b<SUF>c{prefix}<MID>",
    ]
    assert front.client.requests[0].sampling["stop_token_ids"] == [7, 40, 41]
    ids = await front.post("/v1/completions", {"prompt": "a", "suffix": "c", "return_token_ids": True})
    assert ids.json()["choices"][0]["prompt_token_ids"] == list(map(ord, "<PRE>a<SUF>c<MID>"))
    await front.post("/v1/completions", {"prompt": "a", "suffix": "c", "ignore_eos": True})
    assert "stop_token_ids" not in front.client.requests[-1].sampling
    for empty in ("", None):
        await front.post("/v1/completions", {"prompt": "a", "suffix": empty})
        assert front.client.requests[-1].prompt == "a" and "stop_token_ids" not in front.client.requests[-1].sampling


async def test_the_suffix_can_come_first(start):
    front = await start(ok)
    front.client.info.update(fim_template="[SUFFIX]{suffix}[PREFIX]{prefix}", fim_stop_token_ids=[])
    await front.post("/v1/completions", {"prompt": "{suffix}", "suffix": "{prefix}"})
    assert front.client.requests[-1].prompt == "[SUFFIX]{prefix}[PREFIX]{suffix}"


@pytest.mark.parametrize(
    ("options", "info", "body", "param", "says"),
    [
        ({}, {}, {}, "suffix", "model 'demo' has none of the known tokens"),
        ({"fim_template": "none"}, FIM, {}, "suffix", "--fim-template none"),
        ({}, FIM, {"echo": True}, "echo", "leave out one of the two"),
        ({}, FIM, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "leave out one of the two"),
        ({}, FIM, {"prompt": [1, 2]}, "suffix", "send texts"),
        ({}, FIM, {"suffix": ["a"]}, "suffix", "Expected `str"),
    ],
)
async def test_a_suffix_that_cannot_be_honoured_is_refused(start, options, info, body, param, says):
    front = await start(ok, **options)
    front.client.info.update(info)
    refused = await front.post("/v1/completions", {"prompt": "a", "suffix": "b", **body})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert says in refused.json()["error"]["message"]
    assert not front.client.requests


async def test_the_operator_can_name_the_template(start):
    front = await start(ok, fim_template="P{prefix}S{suffix}M")
    await front.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert front.client.requests[-1].prompt == "PaSbM"
    for wrong in ("{prefix}", "{prefix}{suffix}{suffix}", "x"):
        with pytest.raises(ValueError, match="fim_template"):
            GatewayOptions(fim_template=wrong)


async def test_an_error_of_an_invocation_is_the_models(start):
    front = await start(lambda request: [UnavailableError("the queue is full", code="UNAVAILABLE")])
    assert (await front.post("/invocations", {"prompt": "a"})).status_code in (429, 503)
