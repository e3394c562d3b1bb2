"""The blocking client against a real tritonserver, over gRPC and HTTP."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from forwarder import Forwarder

from inflight_client import (
    Client,
    DeadlineExceededError,
    InvalidRequestError,
    Logprob,
    RequestCancelledError,
    RetryPolicy,
    ServerError,
    ServerUnreachableError,
    UnavailableError,
    transport_grpc,
    transport_http,
)
from inflight_client.endpoint import find_endpoint
from inflight_tools.installation import LauncherError
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports

Look = Callable[..., dict[str, Any]]
QUEUE_FULL = {"code": "UNAVAILABLE", "error": "the queue is full: try again later"}


def script(key: str, **values: Any) -> str:
    return json.dumps({"key": key, **values})


def test_a_stream_yields_what_the_model_sends(client: Client) -> None:
    with client.stream("It streams, word by word") as stream:
        chunks = list(stream)
    assert [chunk.text for chunk in chunks] == ["It", " streams,", " word", " by", " word"]
    assert [chunk.token_ids for chunk in chunks] == [[0], [1], [2], [3], [4]]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, None, "stop"]
    assert all(early.elapsed <= late.elapsed for early, late in itertools.pairwise(chunks))
    result = stream.result()
    assert (result.text, result.token_ids) == ("It streams, word by word", [0, 1, 2, 3, 4])
    assert (result.usage.input_tokens, result.usage.output_tokens) == (7, 5)


def test_generate_returns_the_complete_answer(client: Client) -> None:
    result = client.generate("one two three four", max_tokens=3, request_id="my-id")
    assert (result.text, result.finish_reason, result.token_ids) == ("one two three", "length", [0, 1, 2])
    assert (result.request_id, result.model, result.attempts) == ("my-id", "scripted", 1)
    assert result.timings.ttft is not None and 0 < result.timings.ttft <= result.timings.total
    assert len(result.timings.itl) == 2 and result.timings.tpot is not None


def test_text_in_any_script_arrives_intact(client: Client) -> None:
    text = "naïve 漢字 🙂🙃 \u2028line \x00nul"
    assert client.generate(text).text == text


def test_sequences_logprobs_and_prompt_logprobs(client: Client) -> None:
    result = client.generate("a b", n=3, logprobs=0, prompt_logprobs=1, return_cumulative_logprob=True)
    assert [choice.token_ids for choice in result.choices] == [[0, 1], [1000, 1001], [2000, 2001]]
    assert [choice.finish_reason for choice in result.choices] == ["stop"] * 3
    assert result.logprobs == [{0: Logprob(-0.5, 1, "a")}, {1: Logprob(-0.5, 1, "b")}]
    assert result.choices[2].cumulative_logprob == -1.0
    assert result.prompt_logprobs == [None, {5: Logprob(-1.0, 2)}]
    assert result.usage.output_tokens == 6


def test_chat_and_token_ids_are_prompts_too(client: Client) -> None:
    assert client.generate(messages=[{"role": "user", "content": "hi"}]).text == "user:hi"
    result = client.generate(input_ids=[5])
    assert result.text == "5"
    assert result.usage.input_tokens == 1
    assert client.generate(input_ids=[5, 6, 7]).text == "5 6 7"


def test_every_option_reaches_the_model(client: Client, seen: Look, key: str) -> None:
    client.generate(
        script(key, tokens=1),
        temperature=0.5,
        stop=["x"],
        logit_bias={3: 1.5},
        extra_parameters={"new": True},
        request_priority=-7,
        tenant="acme",
        timeout=60.0,
        request_id="id-1",
    )
    inputs = seen(key)["inputs"]
    sampling = {"temperature": 0.5, "stop": ["x"], "logit_bias": {"3": 1.5}, "new": True}
    assert json.loads(inputs["sampling_parameters"]) == sampling
    assert (inputs["request_priority"], inputs["tenant"], inputs["stream"]) == (-7, "acme", True)
    assert 30_000_000 < inputs["timeout"] <= 60_000_000
    assert inputs["request_id"] == "id-1"


def test_headers_reach_the_server(scripted: TritonServer, seen: Look) -> None:
    """Triton's HTTP generate endpoints forward no headers; see test_client_transport.py."""
    with Client(scripted.grpc_address, model="scripted", headers={"X-Tenant": "acme"}) as client:
        assert client.ready()
        client.generate(script("headers", tokens=1))
    assert seen("headers")["inputs"]["parameters"]["x-tenant"] == "acme"


def test_one_response_and_no_token_ids(client: Client, seen: Look, key: str) -> None:
    stream = client.stream(script(key, tokens=3), one_response=True, return_token_ids=False)
    assert [chunk.text for chunk in stream] == ["t0 t1 t2"]
    assert (stream.result().token_ids, stream.result().usage.output_tokens) == ([], 3)
    assert seen(key)["inputs"]["stream"] is False


def test_a_final_flag_without_data_ends_the_stream(client: Client) -> None:
    assert client.generate(json.dumps({"tokens": 2, "late_final": True})).text == "t0 t1"


def test_streams_of_one_thread_run_side_by_side(client: Client, seen: Look, key: str) -> None:
    streams = [client.stream(script(key, tokens=1000, delay=0.01), max_tokens=1000) for _ in range(4)]
    for stream in streams:
        assert [next(stream).text for _ in range(4)] == ["t0", " t1", " t2", " t3"]
    assert seen(key)["running"] == 4
    for stream in streams:
        stream.close()
    seen(key, lambda report: report["cancelled"] == 4)


def test_eight_threads_share_a_client(client: Client) -> None:
    both = threading.Barrier(8, timeout=30)

    def run(number: int) -> str:
        words = [f"w{number}-{i}" for i in range(20)]
        stream = client.stream(json.dumps({"words": words, "delay": 0.005}), max_tokens=20)
        first = next(stream)
        both.wait()  # all eight are running
        assert first.text + "".join(chunk.text for chunk in stream) == " ".join(words)
        return "fine"

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(8))) == ["fine"] * 8


@pytest.mark.parametrize("how", ["cancel", "close", "drop"])
def test_cancelling_ends_only_this_request(client: Client, seen: Look, key: str, how: str) -> None:
    other = client.stream(script(f"{key} other", tokens=20, delay=0.01), max_tokens=20)
    stream = client.stream(script(key, tokens=1000, delay=0.02), max_tokens=1000)
    assert next(other).text == next(stream).text == "t0"
    if how == "cancel":
        stream.cancel()
        with pytest.raises(RequestCancelledError) as caught:
            list(stream)
        assert caught.value.partial is not None and caught.value.partial.text.startswith("t0")
    elif how == "close":
        stream.close()
        assert list(stream) == []
    else:
        del stream
    assert seen(key, lambda report: report["cancelled"] == 1)["finished"] == 0
    assert len(list(other)) == 19
    assert seen(f"{key} other")["cancelled"] == 0


def test_another_thread_can_cancel_before_the_first_token(
    client: Client, seen: Look, key: str, release: Callable[[str], None]
) -> None:
    stream = client.stream(script(key, words=["late"] * 500, delay=0.02, held=True), max_tokens=500)

    def cancel() -> None:
        try:
            seen(key, lambda report: report.get("running") == 1)
        finally:
            stream.cancel()

    with ThreadPoolExecutor() as threads:
        other = threads.submit(cancel)
        try:
            with pytest.raises(RequestCancelledError) as caught:
                next(stream)
        finally:
            release(key)
        other.result()
    assert caught.value.partial is None
    seen(key, lambda report: report["cancelled"] == 1)


def test_cancelling_immediately_or_after_the_end_is_allowed(client: Client) -> None:
    early = client.stream(json.dumps({"tokens": 1000, "delay": 0.02}), max_tokens=1000)
    early.cancel()
    with pytest.raises(RequestCancelledError):
        next(early)
    late = client.stream("a b")
    assert [chunk.text for chunk in late] == ["a", " b"]
    late.cancel()
    assert list(late) == []
    assert late.result().text == "a b"


def test_unavailable_then_success(client: Client, seen: Look, key: str) -> None:
    result = client.generate(script(key, words=["done"], fail_times=2, **QUEUE_FULL))
    assert (result.text, result.attempts) == ("done", 3)
    assert seen(key)["requests"] == 3
    assert result.timings.ttft is not None and result.timings.ttft > 0.1  # including the waits


def test_retries_end(address: str, protocol: Any, seen: Look, key: str) -> None:
    policy = RetryPolicy(max_attempts=2, initial_delay=0.01)
    with (
        Client(address, protocol=protocol, model="scripted", retries=policy) as client,
        pytest.raises(UnavailableError, match="queue is full"),
    ):
        client.generate(script(key, fail_times=99, **QUEUE_FULL))
    assert seen(key)["requests"] == 2


def test_no_retry_after_the_first_token(client: Client, seen: Look, key: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        client.generate(script(key, tokens=2, **QUEUE_FULL))
    assert caught.value.partial is not None and caught.value.partial.text == "t0 t1"
    assert seen(key)["requests"] == 1


def test_an_invalid_value_is_rejected_with_the_servers_message(client: Client, seen: Look, key: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"temperature=-1 is out of range: allowed is \[0, 100\]") as caught:
        client.generate(script(key, tokens=2), temperature=-1, request_id="r7")
    assert caught.value.request_id == "r7"
    assert seen(key)["requests"] == 1


def test_an_unknown_model_is_rejected(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="missing") as caught:
        client.generate("a", model="missing")
    assert caught.value.code == "NOT_FOUND"
    with pytest.raises(InvalidRequestError, match="missing"):
        client.metadata("missing")


def test_a_failure_midway_keeps_the_partial_result(client: Client) -> None:
    with pytest.raises(ServerError, match="KeyError: 'x'") as caught:
        client.generate(json.dumps({"tokens": 3, "code": "INTERNAL", "error": "KeyError: 'x'"}))
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids == [0, 1, 2]
    assert client.generate("still fine").text == "still fine"


def test_the_server_enforces_the_deadline(
    client: Client, seen: Look, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for transport in (transport_grpc, transport_http):
        monkeypatch.setattr(transport, "_GRACE_SECONDS", 60.0)

    def has_begun(timeout: float) -> bool:
        """Whether any output came before the deadline, as it does on a machine with nothing else to do."""
        name = f"{key} {timeout}"
        with pytest.raises(DeadlineExceededError, match="deadline exceeded: timeout of") as caught:
            client.generate(script(name, tokens=1000, delay=0.05), max_tokens=1000, timeout=timeout)
        assert seen(name, lambda report: report["expired"] == 1)["cancelled"] == 0
        return caught.value.partial is not None and bool(caught.value.partial.token_ids)

    assert any(has_begun(timeout) for timeout in (0.3, 3.0, 20.0))


def test_the_client_enforces_a_deadline_that_the_server_ignores(
    client: Client, seen: Look, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for transport in (transport_grpc, transport_http):
        monkeypatch.setattr(transport, "_GRACE_SECONDS", 0.1)
    for seconds in (0.2, 2, 20):  # a busy machine may bring the request to the model too late
        with pytest.raises(DeadlineExceededError, match="did not end the request in time"):
            client.generate(script(key, tokens=500, delay=0.05, no_deadline=True), max_tokens=500, timeout=seconds)
        if seen(key):
            break
    seen(key, lambda report: report["cancelled"] >= 1)


def test_explicit_mode_loads_only_the_named_models(scripted: TritonServer, client: Client) -> None:
    assert client.ready("scripted") and not client.ready("unnamed")
    with pytest.raises(LauncherError, match="metrics service has no address"):
        _ = scripted.metrics_address


def test_health_and_metadata(client: Client) -> None:
    assert client.health()
    assert client.ready()
    assert not client.ready("missing")
    client.wait_until_ready(timeout=60)
    metadata = client.metadata()
    assert metadata["name"] == "scripted"
    assert {"text_output", "token_ids"} <= {output["name"] for output in metadata["outputs"]}
    assert client.server_metadata()["name"] == "triton"
    assert "scripted" in [entry["name"] for entry in client.repository_index()]
    with pytest.raises(DeadlineExceededError, match="'missing' is not ready"):
        client.wait_until_ready(timeout=0.2, model="missing")


def test_a_control_request_is_answered_with_text(client: Client) -> None:
    assert client.control("step_trace") == "answer to step_trace"
    with pytest.raises(InvalidRequestError, match="not supported"):
        client.control("refused")
    with pytest.raises(InvalidRequestError, match="missing"):
        client.control("step_trace", model="missing")


@pytest.mark.parametrize("scheme", ["", "http://", "grpc://"])
def test_an_endpoint_is_found_by_its_address_alone(address: str, protocol: Any, scheme: str) -> None:
    assert find_endpoint(scheme + address) == (protocol, f"{protocol}://{address}")


def test_without_a_server_no_endpoint_is_found() -> None:
    address = f"127.0.0.1:{pick_ports(1)[0]}"
    with pytest.raises(ServerUnreachableError, match=f"cannot reach {address} by HTTP: .*{address} by gRPC: "):
        find_endpoint(address)


def test_an_endpoint_must_be_an_address() -> None:
    for url in ["ftp://host:1", "localhost:notaport", "http://", "[::1"]:
        with pytest.raises(ValueError, match=r"url='"):
            find_endpoint(url)


def test_no_server_at_the_address(protocol: Any) -> None:
    address = f"127.0.0.1:{pick_ports(1)[0]}"
    policy = RetryPolicy(max_attempts=3, initial_delay=0.01)
    with Client(address, protocol=protocol, retries=policy) as client:
        stream = client.stream("a")
        with pytest.raises(ServerUnreachableError, match=f"cannot reach {address}"):
            list(stream)
        assert stream.result().attempts == 3
        assert not client.health()
        assert not client.ready()
        with pytest.raises(DeadlineExceededError, match=f"not ready after 0.2 s: cannot reach {address}"):
            client.wait_until_ready(timeout=0.2)
        with pytest.raises(ServerUnreachableError):
            client.server_metadata()


def test_a_server_that_starts_later_is_found(scripted: TritonServer, protocol: Any) -> None:
    """The client keeps reconnecting for requests sent before the server listens."""
    port = pick_ports(1)[0]
    target = scripted.grpc_address if protocol == "grpc" else scripted.http_address
    policy = RetryPolicy(max_attempts=600, initial_delay=0.1, multiplier=1)
    late = Client(f"127.0.0.1:{port}", protocol=protocol, model="scripted", retries=policy)
    with late as client, ThreadPoolExecutor(1) as pool:
        stream = client.stream("made it")
        reading = pool.submit(list, stream)
        while stream.result().attempts < 2:
            time.sleep(0.02)
        with Forwarder(port, target):
            reading.result(timeout=30)
    assert stream.result().text == "made it"


def test_closing_the_client_ends_open_requests(address: str, protocol: Any, seen: Look, key: str) -> None:
    client = Client(address, protocol=protocol, model="scripted")
    stream = client.stream(script(key, tokens=1000, delay=0.02), max_tokens=1000)
    next(stream)
    client.close()
    client.close()
    seen(key, lambda report: report["cancelled"] == 1)
