"""Everything around the endpoints: keys, limits, paths, models, metrics, pages."""

from __future__ import annotations

import asyncio
import difflib
import json
import socket

import openai
import pytest
from scripted_client import ScriptedClient, text

from inflight_client import (
    DeadlineExceededError,
    InvalidRequestError,
    RequestCancelledError,
    ServerError,
    ServerUnreachableError,
    UnavailableError,
)
from inflight_gateway import upstream
from inflight_gateway.chat_plan import ChatBody
from inflight_gateway.completions import CompletionBody
from inflight_gateway.options import GatewayOptions
from inflight_gateway.responses_input import ResponsesBody
from inflight_gateway.server import with_default_hosts
from inflight_gateway.upstream import _RESUMES, ServedModel, Upstream
from inflight_tools.ports import pick_ports

KEYS = ("first-key", "second-key")


def ok(request):
    return text("a")


async def test_a_key_is_asked_for(start):
    front = await start(ok, api_keys=KEYS)
    for header in ({}, {"Authorization": "Bearer third-key"}, {"Authorization": f"Basic {KEYS[0]}"}):
        response = await front.http.get("/v1/models", headers=header)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for key in KEYS:
        assert (await front.http.get("/v1/models", headers={"Authorization": f"bearer  {key}"})).status_code == 200
    for path in ("/health", "/health/ready", "/ping", "/ready", "/version"):
        assert (await front.http.get(path)).status_code == 200
    for path in ("/metrics", "/page/status", "/openapi.json", "/tokenize", "/nowhere", "/health/", "/docs/"):
        assert (await front.http.get(path)).status_code == 401
    for path in (f"{front.url}//health", f"{front.url}//docs"):
        assert (await front.http.get(path)).status_code == 401
    hostile = [b"Bearer \xff\xfe", b"Bearer", b"", b"Bearer first-key second-key"]
    for value in hostile:
        assert (await front.http.get("/v1/models", headers=[(b"Authorization", value)])).status_code == 401


def test_keys_that_no_header_can_hold_are_refused():
    for key in ("", "a b", "ключ", "a\n"):
        with pytest.raises(ValueError, match="api_keys"):
            GatewayOptions(api_keys=(key,))


async def test_browsers_get_in_only_if_asked(start):
    origin = {"Origin": "https://page.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    closed, opened = await start(ok), await start(ok, cors_origins=("https://page.example",), api_keys=KEYS)
    assert (await closed.http.options("/v1/completions", headers=preflight)).status_code == 405
    assert "access-control-allow-origin" not in (await closed.http.get("/health", headers=origin)).headers
    allowed = await opened.http.options("/v1/completions", headers=preflight)
    assert allowed.status_code == 200 and "authorization" in allowed.headers["access-control-allow-headers"]
    refused = await opened.http.get("/v1/models", headers=origin)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://page.example"


async def test_paths_that_are_not_there_answer_with_an_error_object(start):
    front = await start(ok)
    for method, path, status, code in [
        ("POST", "/v1/moderations", 404, "unsupported_endpoint"),
        ("POST", "/v1/audio/speech", 404, "unsupported_endpoint"),
        ("GET", "/v1/files", 404, "unsupported_endpoint"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/demo", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt", 404, "model_not_found"),
    ]:
        response = await front.http.request(method, path)
        assert response.status_code == status and response.json()["error"]["code"] == code
        assert status != 405 or response.headers["allow"]


async def test_models_that_take_text_are_listed(start):
    client = ScriptedClient(ok, ["demo", "org/other", "vllm"])
    client.inputs["vllm"] = ("text_input", "stream", "sampling_parameters", "exclude_input_in_output")
    client.inputs["resnet"] = ("image",)
    front = await start(client)
    models = [model async for model in await front.openai.models.list()]
    assert [model.id for model in models] == ["demo", "org/other", "vllm"]
    assert models[0].max_model_len == 2048 and models[0].created > 1_700_000_000
    assert (await front.openai.models.retrieve("org/other")).id == "org/other"
    with pytest.raises(openai.NotFoundError, match=r"'resnet' does not exist; models here: demo, org/other, vllm"):
        await front.openai.completions.create(model="resnet", prompt="a")


async def test_only_the_chosen_models_are_listed(start):
    front = await start(ScriptedClient(ok, ["a", "b"]), models=("b", "gone"))
    assert [model.id async for model in await front.openai.models.list()] == ["b"]


async def test_a_request_without_a_model_means_the_only_one(start):
    one, two = await start(ok), await start(ScriptedClient(ok, ["a", "b"]))
    assert (await one.post("/v1/completions", {"prompt": "a"})).json()["model"] == "demo"
    response = await two.post("/v1/completions", {"prompt": "a"})
    assert response.status_code == 400 and "models here: a, b" in response.text


async def test_another_backend_gets_only_what_it_knows(start):
    client = ScriptedClient(ok)
    client.inputs["demo"] = ("text_input", "stream", "sampling_parameters")
    front = await start(client)
    body = {"prompt": "a", "user": "me", "priority": 3, "cache_salt": "s", "max_tokens": 4}
    assert (await front.post("/v1/completions", body)).status_code == 200
    request = client.requests[0]
    assert not request.return_token_ids and not request.return_num_cached_tokens
    assert (request.tenant, request.request_priority, request.cache_salt) == (None, None, None)
    assert (await front.post("/tokenize", {"prompt": "a"})).json()["error"]["param"] == "model"


async def test_errors_of_triton_have_a_status(start):
    for error, status, code, wait in [
        (InvalidRequestError("n=0: must be at least 1"), 400, None, None),
        (UnavailableError("the queue is full; retry in 2.5 s"), 429, "queue_full", "3"),
        (UnavailableError("the model is draining"), 503, "unavailable", "1"),
        (ServerUnreachableError("cannot reach 127.0.0.1:1"), 503, "upstream_unreachable", "1"),
        (DeadlineExceededError("deadline exceeded"), 504, "timeout", None),
        (RequestCancelledError("Request was cancelled"), 503, "cancelled", "1"),
        (ServerError("logits of the request are not finite"), 500, "upstream_error", None),
        (KeyError("a fault of our own"), 500, "internal_error", None),
    ]:
        for stream in [False, True]:
            front = await start(lambda request, error=error: [error])
            response = await front.post("/v1/completions", {"prompt": "a", "stream": stream})
            assert (response.status_code, response.headers.get("retry-after")) == (status, wait)
            assert response.json()["error"]["code"] == code and "fault of our own" not in response.text


@pytest.mark.parametrize(("seconds", "status"), [(60, 200), (0, 503)])
async def test_requests_wait_for_a_server_that_restarts(start, monkeypatch, seconds, status):
    monkeypatch.setattr(upstream, "_FIRST_DELAY", 0.01)

    class Restarting(ScriptedClient):
        failures = 3

        async def metadata(self, model):
            self.failures -= 1
            if self.failures >= 0:
                raise ServerUnreachableError("cannot reach 127.0.0.1:1")
            return await super().metadata(model)

    for model in ("demo", None):
        front = await start(Restarting(ok), reconnect_timeout=seconds)
        response = await front.post("/v1/completions", {"prompt": "a", "model": model})
        assert response.status_code == status, response.text
        front = await start(Restarting(ok), reconnect_timeout=seconds)
        assert (await front.http.get("/v1/models/demo")).status_code == 503, "a question is answered at once"


@pytest.mark.parametrize("resumes", [True, False])
async def test_streams_wait_for_a_server_as_long_as_the_operator_says(resumes):
    (port,) = pick_ports(1)
    attempts = []
    for seconds in (0.0, 0.3):
        options = GatewayOptions(triton=(f"127.0.0.1:{port}",), reconnect_timeout=seconds)
        found = Upstream(options)
        found._known["demo"] = 0.0, ServedModel("demo", frozenset({_RESUMES} if resumes else ()), frozenset())
        stream = found.stream(model="demo", prompt="a")
        with pytest.raises(ServerUnreachableError):
            await stream.__anext__()
        attempts.append(stream.result().attempts)
        await found.close()
    assert attempts[0] == 1 < attempts[1]


async def test_when_one_prompt_fails_the_others_are_cancelled(start):
    client = ScriptedClient(
        lambda request: [InvalidRequestError("too long: at most 5")] if request.prompt == "bad" else [asyncio.Event()]
    )
    front = await start(client)
    response = await front.post("/v1/completions", {"prompt": ["good", "bad"]})
    assert response.status_code == 400 and client.streams[0].cancelled.is_set()
    assert front.gateway.metrics.open_requests == 0


async def test_too_many_open_requests_are_refused(start):
    held = asyncio.Event()
    front = await start(lambda request: [held, *text("a")], max_open_requests=1)
    first = asyncio.create_task(front.post("/v1/completions", {"prompt": "a"}))
    while not front.client.streams:
        await asyncio.sleep(0.01)
    refused = await front.post("/v1/completions", {"prompt": "a", "stream": True})
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    held.set()
    assert (await first).status_code == 200
    assert (await front.post("/v1/completions", {"prompt": "a"})).status_code == 200


async def raw(front, request: bytes) -> bytes:
    """The answer to bytes on a connection of their own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
    writer.write(request)
    answer = await reader.read(65536)
    writer.close()
    return answer


async def test_bodies_have_limits(start):
    front = await start(ok, max_body_bytes=1000, max_body_depth=5, max_body_items=50)
    deep = json.loads("[" * 8 + "]" * 8)
    bodies = {
        413: [b"x" * 1001],
        400: [
            b"",
            b"{",
            b"[]",
            b"null",
            b'"a"',
            b"1",
            b"\xff",
            b'{"prompt": "\xff"}',
            b'{"prompt": "\\ud800"}',
            b"NaN",
        ],
    }
    bodies[400] += [json.dumps(b).encode() for b in ({"prompt": deep}, {"prompt": [1] * 60}, {"prompt": [[1]] * 5})]
    assert (await front.post("/v1/completions", {"prompt": [[1]] * 3})).status_code == 200
    bodies[400].append(b'{"prompt":' + b"[" * 400 + b"]" * 400 + b"}")
    for status, raws in bodies.items():
        for content in raws:
            response = await front.http.post("/v1/completions", content=content)
            assert response.status_code == status and response.json()["error"]["message"], content
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{"
    assert (await raw(await start(ok, body_timeout=0.1), head)).startswith(b"HTTP/1.1 408")


async def test_deeply_nested_bodies_do_not_exhaust_the_stack(start):
    front = await start(ok)
    response = await front.http.post("/v1/completions", content=b'{"prompt":' + b"[" * 200_000)
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
    ],
)
async def test_unknown_keys_are_named_and_refused_only_if_strict(start, path, body):
    front, strict = await start(ok, cors_origins=("https://page.example",)), await start(ok, strict=True)
    unknown = {**body, "modell": "demo", "x\ny": 1, "ключ": None}
    response = await front.post(path, unknown, headers={"Origin": "https://page.example"})
    assert response.status_code == 200, response.text
    warning = response.headers["x-inflight-warning"]
    assert "unknown parameter 'modell' was ignored (did you mean 'model'?); " in warning
    assert warning.endswith("unknown parameter 'x\\ny' was ignored"), "a null is a default, whatever its key"
    assert "x-inflight-warning" in response.headers["access-control-expose-headers"]
    shown = (await front.http.get("/metrics")).text
    assert f'inflight_gateway_warnings_total{{endpoint="{path}",reason="unknown_key"}} 2.0' in shown
    refused = await strict.post(path, unknown)
    assert refused.status_code == 400 and "unknown parameter 'modell'; did you mean 'model'?" in refused.text
    assert (await strict.post(path, {**body, "ключ": None})).status_code == 200


async def test_unknown_stream_options_are_unknown_keys(start):
    front, strict = await start(ok), await start(ok, strict=True)
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": None, "colour": 1}}
    response = await front.post("/v1/completions", body)
    assert response.headers["x-inflight-warning"] == "unknown parameter 'stream_options.colour' was ignored"
    assert (await strict.post("/v1/completions", body)).status_code == 400


async def test_many_unknown_keys_do_not_make_a_large_header(start):
    front = await start(ok)
    response = await front.post("/v1/completions", {"prompt": "a", **{f"{i}{'x' * 500}": 1 for i in range(50)}})
    assert response.status_code == 200 and len(response.headers["x-inflight-warning"]) < 3000
    assert response.headers["x-inflight-warning"].endswith("; and 42 more")


@pytest.mark.parametrize("nested", [False, True])
async def test_unknown_keys_take_no_more_time_than_the_rest_of_a_body(start, monkeypatch, nested):
    """Similar names are looked for in the thread that passes on all streams."""
    looked_for, look = [], difflib.get_close_matches
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda key, *rest, **n: looked_for.append(key) or look(key, *rest, **n)
    )
    front = await start(ok)

    def body(unknown):
        return {"prompt": "a", "stream": True, "stream_options": unknown} if nested else {"prompt": "a", **unknown}

    assert (await front.post("/v1/completions", body({f"tempera{i}": 1 for i in range(100)}))).status_code == 200
    assert (await front.post("/v1/completions", body({"x" * 100_000: 1}))).status_code == 200
    refused = await front.post("/v1/completions", body({f"tempera{i}": 1 for i in range(101)}))
    assert refused.status_code == 400 and "101 unknown parameters" in refused.text and "at most 100" in refused.text
    assert len(looked_for) < 20 and max(map(len, looked_for)) <= 200


@pytest.mark.parametrize(
    ("key", "body"), [("prompt", {"prompt": [2**70]}), ("priority", {"prompt": "a", "priority": 2**40})]
)
async def test_what_the_client_library_refuses_names_its_key(start, key, body):
    front = await start(ok)
    refused = await front.post("/v1/completions", body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == key


async def test_a_long_name_of_a_model_is_not_repeated(start):
    front = await start(ok)
    refused = await front.post("/v1/completions", {"prompt": "a", "model": "m" * 10_000})
    assert refused.status_code == 404 and len(refused.content) < 1000 and "mmm" in refused.text


async def test_a_server_that_lists_models_only_with_a_key_is_not_waited_for(start, monkeypatch):
    """It answers a gateway without the key with UNAVAILABLE, the code of one that cannot be reached."""
    front = await start(ok)

    async def restricted():
        header = "triton-grpc-protocol-inflight-admin-key"
        raise ServerUnreachableError(
            f"cannot reach a:1 by gRPC: This protocol is restricted, expecting header '{header}'"
        )

    monkeypatch.setattr(front.client, "repository_index", restricted)
    assert (await front.post("/v1/completions", {"prompt": "a", "model": "demo"})).status_code == 200
    for answer in (
        await front.post("/v1/completions", {"prompt": "a", "model": "other"}),
        await front.post("/v1/completions", {"prompt": "a"}),
        await front.http.get("/v1/models"),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "configuration_error")
        assert "INFLIGHT_ADMIN_KEY" in error["message"] and "--model" in error["message"]


async def test_null_is_the_default_of_every_key(start):
    front = await start(ok, strict=True)
    for path, kind, body in [
        ("/v1/completions", CompletionBody, {"prompt": "a"}),
        ("/v1/chat/completions", ChatBody, {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", ResponsesBody, {"input": "a"}),
    ]:
        keys = {*kind.__struct_fields__, *kind.UNSUPPORTED, *kind.IGNORED} - body.keys()
        response = await front.post(path, {**dict.fromkeys(keys), **body})
        assert response.status_code == 200, response.text
        assert (await front.post(path, dict.fromkeys(body))).json()["error"]["code"] == "missing_required_parameter"


async def test_numbers_can_be_strings(start):
    front = await start(ok)
    loose = {"max_tokens": "10", "temperature": "0.7", "n": 1.0, "seed": "5", "ignore_eos": "true", "stream": 0}
    response = await front.post("/v1/completions", {"prompt": "a", **loose, "logit_bias": {"5": "-1"}})
    assert response.status_code == 200 and front.client.requests[0].sampling == {
        "max_tokens": 10,
        "temperature": 0.7,
        "n": 1,
        "seed": 5,
        "ignore_eos": True,
        "logit_bias": {"5": -1.0},
    }
    for wrong in ({"max_tokens": "many"}, {"max_tokens": 1.5}, {"temperature": ""}, {"stream": "yes"}, {"n": True}):
        assert (await front.post("/v1/completions", {"prompt": "a", **wrong})).status_code == 400, wrong


async def test_tokens_have_vllms_form(start):
    front = await start(ok)
    answer = await front.post("/tokenize", {"model": "demo", "prompt": "ab"})
    assert answer.json() == {"count": 2, "max_model_len": 2048, "tokens": [97, 98], "token_strs": None}
    chat = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False, "tools": []}
    assert (await front.post("/tokenize", chat)).status_code == 200
    assert front.client.questions[-1] == chat
    assert (await front.post("/detokenize", {"tokens": [97, 98]})).json() == {"prompt": "ab"}
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": "a", "tools": []}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [2000000]}),
    ):
        assert (await front.post(path, body)).status_code == 400


async def test_readiness_follows_the_models(start):
    client = ScriptedClient(ok)
    front = await start(client)
    assert (await front.http.get("/ready")).status_code == 200
    client.is_ready = False
    assert (await front.http.get("/ready")).json()["error"]["code"] == "not_ready"
    client.is_ready, client.is_silent = True, True
    assert (await front.http.get("/ready")).json()["error"]["code"] == "not_ready", "Triton does not notice"
    assert (await front.http.get("/health")).status_code == 200


async def test_metrics_count_requests_and_chunks(start):
    front = await start(lambda request: text("a", "b"))
    await front.post("/v1/completions", {"prompt": "a", "stream": True})
    await front.http.get("/v1/models/nothing")
    await front.http.get("/secret/path")
    shown = (await front.http.get("/metrics")).text
    assert 'inflight_gateway_requests_total{endpoint="/v1/completions",status="200"} 1.0' in shown
    assert 'inflight_gateway_requests_total{endpoint="/v1/models/{model}",status="404"} 1.0' in shown
    assert 'inflight_gateway_requests_total{endpoint="other",status="404"} 1.0' in shown
    assert "inflight_gateway_chunks_total 2.0" in shown and "inflight_gateway_open_requests 0.0" in shown
    assert 'inflight_gateway_request_seconds_count{endpoint="/v1/completions"} 1.0' in shown


async def test_the_pages_describe_every_endpoint(start):
    front = await start(ok)
    document = (await front.http.get("/openapi.json")).json()
    assert {"/v1/completions", "/v1/models/{model}", "/tokenize"} <= document["paths"].keys()
    properties = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "top_k", "stream_options"} <= properties.keys()
    page = (await front.http.get("/docs")).text
    assert all(path in page for path in document["paths"])


# -- hosts ---------------------------------------------------------------------------------------------


async def test_names_that_are_not_this_servers_are_refused(start):
    front = await start(ok, allowed_hosts=("llm.example", "*.llm.example"), cors_origins=("*",))
    local = ("localhost", "LOCALHOST:9000", "a.localhost", "127.0.0.1:9000", "10.0.0.7", "[::1]:9000", "[fe80::1]")
    for host in (*local, socket.gethostname(), "me.local", "host.docker.internal:9", "llm.example.", "a.b.LLM.example"):
        assert (await front.http.get("/v1/models", headers={"Host": host})).status_code == 200, host
    for host in (
        "evil.example",
        "llm.example.evil.example",
        "xllm.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
    ):
        for path in ("/health", "/health/ready", "/ping", "/ready"):
            assert (await front.http.get(path, headers={"Host": host})).status_code != 403, "probes have any name"
        for path in ("/v1/models", "/", "/nowhere"):
            refused = await front.http.get(path, headers={"Host": host, "Origin": "https://a"})
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "host_not_allowed"
            assert refused.headers["access-control-allow-origin"] == "*", "so that a page can read why"
    told = await front.http.get("/api/tags", headers={"Host": "evil.example"})
    assert "--allowed-hosts" in told.json()["error"]


async def test_any_name_is_allowed_unless_the_operator_says_so(start):
    for options in ({}, {"allowed_hosts": ("*",)}):
        front = await start(ok, **options)
        assert (await front.http.get("/v1/models", headers={"Host": "evil.example"})).status_code == 200


def test_a_gateway_of_this_machine_without_keys_has_local_names_only():
    for host, options, expected in (
        ("127.0.0.1", {}, ("localhost",)),
        ("::1", {}, ("localhost",)),
        ("localhost", {}, ("localhost",)),
        ("0.0.0.0", {}, ()),
        ("10.0.0.7", {}, ()),
        ("127.0.0.1", {"api_keys": KEYS}, ()),
        ("127.0.0.1", {"allowed_hosts": ("*",)}, ("*",)),
    ):
        assert with_default_hosts(GatewayOptions(**options), host).allowed_hosts == expected
    for wrong in ("", "a:80", "http://a", "a.*", "a b"):
        with pytest.raises(ValueError, match="allowed_hosts"):
            GatewayOptions(allowed_hosts=(wrong,))
