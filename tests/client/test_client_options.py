"""Arguments of the clients and of a request."""

from __future__ import annotations

import dataclasses
import gc
import ssl
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from inflight_client import AsyncClient, Client
from inflight_client.connection import Connection
from inflight_client.request import GenerationRequest, checked_ids


def build(prompt: str | None = "p", messages: Any = None, input_ids: Any = None, **options: Any) -> GenerationRequest:
    return GenerationRequest.build(prompt, messages, input_ids, options, model="m", timeout=9.0)  # type: ignore[arg-type]


def test_options_end_up_in_their_fields() -> None:
    request = build(max_tokens=5, top_p=0.5, tenant="t", request_priority=1, extra_parameters={"new_one": 1}, seed=3)
    assert request.sampling == {"max_tokens": 5, "top_p": 0.5, "new_one": 1, "seed": 3}
    assert (request.model, request.tenant, request.request_priority, request.timeout) == ("m", "t", 1, 9.0)
    assert request.stream and request.return_token_ids


def test_options_override_the_clients_defaults() -> None:
    request = build(model="other", timeout=None, request_id="mine", one_response=True)
    assert (request.model, request.timeout, request.request_id, request.stream) == ("other", None, "mine", False)


def test_requests_without_an_id_get_distinct_ones() -> None:
    assert build().request_id != build().request_id != ""


def test_values_become_plain_json() -> None:
    request = build(
        None,
        input_ids=np.array([1, 2], dtype=np.int32),
        logit_bias={np.int64(5): np.float32(0.5)},
        stop=("a", "b"),
        stop_token_ids=np.array([7]),
        allowed_token_ids=(0, 1),
        truncate_prompt_tokens=np.int64(9),
    )
    assert request.input_ids == [1, 2] and type(request.input_ids[0]) is int
    assert request.sampling == {
        "logit_bias": {"5": 0.5},
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "allowed_token_ids": [0, 1],
        "truncate_prompt_tokens": 9,
    }


@pytest.mark.parametrize(
    "prompts", [(None, None, None), ("p", None, [1]), ("p", [{"role": "user", "content": "x"}], None)]
)
def test_exactly_one_prompt(prompts: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one of prompt, messages and input_ids"):
        build(*prompts)


CHAT = [{"role": "user", "content": "x"}]


def test_options_of_the_chat_template_go_with_the_messages() -> None:
    tools = ({"type": "function", "function": {"name": "f"}},)
    request = build(None, CHAT, tools=tools, chat_template_kwargs={"a": np.int64(1)}, add_generation_prompt=False)
    assert request.chat == {
        "tools": list(tools),
        "chat_template_kwargs": {"a": 1},
        "add_generation_prompt": False,
    }
    assert build(None, CHAT, tools=None, continue_final_message=None).chat == {}


@pytest.mark.parametrize("option", [{"tools": []}, {"continue_final_message": False}, {"chat_template_kwargs": {}}])
def test_options_of_the_chat_template_need_messages(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="only for messages"):
        build("p", **option)


def test_an_unpaired_surrogate_is_rejected_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match=r"prompt contains an unpaired surrogate, '\\udcff', at 3"):
        GenerationRequest.build("bad\udcff", None, None, {}, model="m", timeout=None)


def test_values_of_the_wrong_type_are_rejected_before_anything_is_sent() -> None:
    for arguments, error, match in [
        ({"prompt": 5}, TypeError, "prompt must be a string, not int"),
        ({"tenant": 5}, TypeError, "tenant must be a string"),
        ({"cache_salt": b"x"}, TypeError, "cache_salt must be a string, not bytes"),
        ({"model": 5}, TypeError, "model must be a string"),
        ({"request_id": 5}, TypeError, "request_id must be a string"),
        ({"tenant": "\ud800"}, ValueError, "tenant contains an unpaired surrogate"),
        ({"request_priority": 2**31}, ValueError, "request_priority: must be integers within the range of INT32"),
        ({"prompt": None, "messages": "hello"}, TypeError, "messages must be a list of objects"),
        ({"prompt": None, "messages": [1]}, TypeError, "messages must be a list of objects"),
        ({"prompt": None, "input_ids": [1.5]}, TypeError, "float"),
        ({"prompt": None, "input_ids": [2**63]}, ValueError, "input_ids: must be integers within the range of INT64"),
    ]:
        with pytest.raises(error, match=match):
            build(**arguments)


def test_the_number_of_sequences_is_parsed_as_by_the_server() -> None:
    values = [2, 2.0, "2", np.int32(2)]
    assert [build(n=n).n for n in values] == [2, 2, 2, 2]
    assert build(extra_parameters={"num_return_sequences": 3}).n == 3
    assert [build(n=n).n for n in (None, "x", [1], 0)] == [1, 1, 1, 1]


def test_an_unknown_option_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="'max_token'; did you mean 'max_tokens'"):
        build(max_token=4)
    with pytest.raises(TypeError, match="extra_parameters"):
        build(zzz=4)


def test_a_timeout_is_a_positive_number() -> None:
    for timeout in [0, -1, float("nan"), float("inf"), 1e12]:
        with pytest.raises(ValueError, match="timeout"):
            build(timeout=timeout)


def connection(url: str | None = None, protocol: str = "grpc", **options: Any) -> Connection:
    return Connection.build(url, protocol, options)  # type: ignore[arg-type]


def test_default_addresses_are_tritons_ports() -> None:
    assert connection().address == "127.0.0.1:8001"
    assert connection(protocol="http").base_url == "http://127.0.0.1:8000"


def test_a_scheme_selects_tls() -> None:
    assert connection("https://host:1/base/", "http").base_url == "https://host:1/base"
    assert connection("grpcs://host:1").ssl and connection("grpcs://host:1").address == "host:1"
    assert not connection("grpc://host:1").ssl


def test_invalid_connections_are_rejected() -> None:
    for url, protocol, options, match in [
        ("http://host:8000", "grpc", {}, "grpc://"),
        ("host:1", "rest", {}, "protocol='rest'"),
        ("host:1", "http", {"creds": object()}, "creds"),
        ("host:notaport", "http", {}, "host:port"),
        ("host:99999", "http", {}, "host:port"),
        ("::::", "http", {}, "host:port"),
        ("[::1", "http", {}, "host:port"),
        ("http://", "http", {}, "host:port"),
        ("host:1", "grpc", {"ssl_context": ssl.create_default_context()}, "ssl_context"),
    ]:
        with pytest.raises(ValueError, match=match):
            connection(url, protocol, **options)


def test_an_unknown_connection_option_is_rejected() -> None:
    for client in (Client, AsyncClient):
        with pytest.raises(TypeError, match="verifi"):
            client("host:1", verifi=True)  # type: ignore[call-arg]


def test_tls_options_reach_tritonclient() -> None:
    options = connection(
        ssl=True, root_certificates="ca.pem", private_key="key.pem", certificate_chain="chain.pem", creds="c"
    ).grpc_client_options()
    assert options["ssl"] is True
    assert (options["root_certificates"], options["private_key"]) == ("ca.pem", "key.pem")
    assert (options["certificate_chain"], options["creds"]) == ("chain.pem", "c")


def test_given_channel_arguments_replace_ours() -> None:
    assert connection(channel_args=[("a", 1)]).grpc_client_options()["channel_args"] == [("a", 1)]


def test_proxies_do_not_apply_to_this_machine() -> None:
    for host, loopback in [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("10.0.0.1:1", False),
        ("gpu:1", False),
    ]:
        assert connection(host).is_loopback is loopback
        assert (("grpc.enable_http_proxy", 0) in connection(host).grpc_client_options()["channel_args"]) is loopback


def test_a_name_is_looked_up_again_soon() -> None:
    """By default gRPC waits half a minute after the last time: too long when other servers take its place."""
    assert (
        dict(connection("gpu:1").grpc_client_options()["channel_args"])["grpc.dns_min_time_between_resolutions_ms"]
        <= 1000
    )


def test_headers_are_lower_case_in_grpc() -> None:
    assert connection(headers={"Authorization": "x"}).grpc_headers() == {"authorization": "x"}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_closed_client_raises(protocol: Any) -> None:
    client = Client("127.0.0.1:1", protocol=protocol)
    client.close()
    client.close()
    for call in (client.health, client.ready, client.metadata, lambda: client.generate("x")):
        with pytest.raises(RuntimeError, match=r"the client for 127.0.0.1:1 is closed; create a new one"):
            call()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_closed_asyncio_client_raises(protocol: Any) -> None:
    client = AsyncClient("127.0.0.1:1", protocol=protocol)
    await client.health()
    await client.close()
    await client.close()
    with pytest.raises(RuntimeError, match="is closed; create a new one"):
        await client.generate("x")


def test_a_dropped_client_leaves_no_thread() -> None:
    others = threading.enumerate()
    client = Client("127.0.0.1:1", protocol="http")
    assert not client.health()
    (thread,) = [one for one in threading.enumerate() if one.name == "inflight-client" and one not in others]
    del client
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_the_client_needs_no_torch() -> None:
    heavy = ("torch", "transformers", "inflight")
    code = f"import sys, inflight_client, inflight_client.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_schema_may_be_a_dict_json_text_a_pydantic_model_or_a_dataclass() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel):
        city: str

    @dataclasses.dataclass
    class Data:
        city: str

    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    assert build(json_schema=schema).sampling == {"structured_outputs": {"json": schema}}
    assert build(json_schema="{}").sampling == {"structured_outputs": {"json": "{}"}}
    for described in (Model, Data):
        sent = build(json_schema=described, structured_outputs={"disable_any_whitespace": True}).sampling
        found = sent["structured_outputs"]
        assert found["disable_any_whitespace"] is True and found["json"]["required"] == ["city"]
    with pytest.raises(TypeError, match="give a dict, JSON text, a pydantic model or a dataclass"):
        build(json_schema=5)


def test_trace_context_is_all_that_a_propagators_headers_add() -> None:
    given = {"Traceparent": "00-ab-cd-01", "tracestate": "", "b3": "x", "baggage": "k=v"}
    assert build("p", trace_headers=given).trace_headers == {"traceparent": "00-ab-cd-01"}
    assert build("p", trace_headers={}).trace_headers == build("p").trace_headers == {}
    for bad in ("é", "a\nb", 7):
        with pytest.raises(ValueError, match=r"trace_headers: traceparent=.* must be printable ASCII"):
            build("p", trace_headers={"traceparent": bad})


@pytest.mark.parametrize("given", [[1, True, np.int32(3)], (1, 1, 3), np.array([1, 1, 3], np.uint8), b"\x01\x01\x03"])
def test_any_integers_are_token_ids(given: Any) -> None:
    found = checked_ids("input_ids", given)
    assert found == [1, 1, 3] and set(map(type, found)) == {int}


@pytest.mark.parametrize("given", [[1.0], ["1"], [None], [[1]], np.ones(3), np.ones((2, 1), np.int64), "1"])
def test_nothing_else_is(given: Any) -> None:
    with pytest.raises(TypeError):
        checked_ids("input_ids", given)
