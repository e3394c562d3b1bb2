"""The frontend in a real tritonserver, with an engine process that echoes the prompt."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_engine
import pytest
import tritonclient.grpc as grpcclient
from fake_clients import (
    BACKEND_ERROR,
    ECHO,
    PROMPT,
    TOKENIZER,
    Grpc,
    events,
    flags,
    generate,
    joined,
    post,
    scrape,
    slow,
    tensor,
    text,
)
from fake_repository import FAKE_CONFIG, fake_options
from model_entries import loaded, write_entry
from processes_of import model_processes
from wire import wait_for

from inflight_tools.launcher import TritonServer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fake")


@pytest.fixture(scope="module")
def entry(triton: TritonServer, root: Path) -> Path:
    environment = {"FAKE_ENGINE_CONTROL": str(root / "control.json"), "FAKE_ENGINE_LOG": str(root / "aborts")}
    options = {**fake_options(root, environment), "max_num_seqs": 31, "max_queue_size": 1}
    return write_entry(triton.repositories[-1], "fake", FAKE_CONFIG, **options)


@pytest.fixture(scope="module")
def fake(triton: TritonServer, entry: Path) -> Iterator[TritonServer]:
    with loaded(triton, "fake") as server:
        yield server


@pytest.fixture
def grpc(fake: TritonServer) -> Iterator[Grpc]:
    grpc = Grpc(fake)
    yield grpc
    grpc.close()  # cancelling a stream after Triton rejected one of its requests keeps the model loaded forever


# -- responses ---------------------------------------------------------------------------------


def test_grpc_streaming(grpc: Grpc) -> None:
    wanted = flags("stream", "return_finish_reason", "return_token_ids", "return_num_output_tokens")
    grpc.send(text(), *wanted, parameters={"temperature": "0", "max_tokens": 16})
    responses = grpc.take()
    assert joined(responses) == ECHO
    ids = [token for response in responses for token in response.as_numpy("token_ids").tolist()]
    assert ids == fake_engine.echo(TOKENIZER.encode(PROMPT), 16)
    reasons = [response.as_numpy("finish_reason")[0] for response in responses]
    assert reasons[-1] == b"length"
    assert set(reasons[:-1]) <= {b"None"}


def test_grpc_without_streaming_prepends_the_prompt(grpc: Grpc) -> None:
    grpc.send(text())
    (response,) = grpc.take()
    assert joined([response]) == PROMPT + ECHO


def test_grpc_typed_inputs_and_many_at_once(grpc: Grpc) -> None:
    for number in range(1, 9):
        grpc.send(
            text(),
            tensor("max_tokens", [number], "INT32"),
            tensor("temperature", [0.5], "FP32"),
            *flags("stream", "return_token_ids"),
            request_id=str(number),
        )
    for number in range(1, 9):
        assert sum(len(r.as_numpy("token_ids")) for r in grpc.take(str(number))) == number


def test_grpc_input_ids_and_n(grpc: Grpc) -> None:
    wanted = flags("exclude_input_in_output", "return_token_ids", "return_cumulative_logprob")
    grpc.send(tensor("input_ids", [5, 6], "INT64"), *wanted, parameters={"n": 2, "max_tokens": 3})
    (response,) = grpc.take()
    assert response.as_numpy("token_ids").tolist() == [5, 6, 5, 5, 6, 5]
    assert response.as_numpy("token_counts").tolist() == [3, 3]
    assert response.as_numpy("cumulative_logprob").tolist() == [-1.5, -1.5]
    assert len(response.as_numpy("text_output")) == 2


def test_generate(fake: TritonServer) -> None:
    answer = generate(fake, temperature=0, return_num_input_tokens=True, return_finish_reason=True, id="x1")
    assert answer["text_output"] == PROMPT + ECHO
    assert (answer["num_input_tokens"], answer["finish_reason"]) == (len(TOKENIZER.encode(PROMPT)), "length")


def test_generate_with_logprobs(fake: TritonServer) -> None:
    answer = generate(fake, return_logprobs=True, logprobs=1, prompt_logprobs=0, max_tokens=2)
    assert [len(row) for row in json.loads(answer["logprobs"])] == [2, 2]
    assert json.loads(answer["prompt_logprobs"])[0] is None


def test_several_sequences_have_the_prompts_logprobs_once(fake: TritonServer) -> None:
    body = {"text_input": PROMPT, "parameters": {"n": 3, "prompt_logprobs": 0, "max_tokens": 2}}
    answer = generate(fake, **body, exclude_input_in_output=True)
    assert [row is None for row in json.loads(answer["prompt_logprobs"])] == [
        index == 0 for index in range(len(TOKENIZER.encode(PROMPT)))
    ]


def test_generate_stream(fake: TritonServer) -> None:
    pauses = {"tenant": "delay=0.05", "max_tokens": 16}  # a frontend without a core would send several at once
    status, answer = post(fake, "generate_stream", {"text_input": PROMPT, "stream": True, "parameters": pauses})
    assert status == 200
    assert "".join(event["text_output"] for event in events(answer)) == ECHO
    assert len(events(answer)) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_litellm(fake: TritonServer, stream: bool) -> None:
    parameters = {"max_tokens": 2000, "bad_words": [""], "stop_words": [""], "max_completion_tokens": 16}
    body = {"text_input": PROMPT, "parameters": parameters, "stream": stream}
    status, answer = post(fake, "generate_stream" if stream else "generate", body)
    assert status == 200, answer
    text = "".join(e["text_output"] for e in events(answer)) if stream else json.loads(answer)["text_output"]
    assert text == ECHO if stream else PROMPT + ECHO


def test_requests_of_tensorrt_llm_clients(fake: TritonServer) -> None:
    body = {"max_tokens": 16, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2, "beam_width": 1}
    assert generate(fake, **body, top_k=1, random_seed=3)["text_output"] == PROMPT + ECHO


def test_messages(fake: TritonServer) -> None:
    status, answer = post(fake, "generate", {"messages": json.dumps([{"role": "user", "content": "hi"}])})
    assert status == 200, answer
    assert json.loads(answer)["text_output"].startswith("user\nhi")


def test_the_engines_answer_comes_as_one_response(fake: TritonServer) -> None:
    def ask() -> tuple[int, str]:
        return post(fake, "generate", {"control": "step_trace"})

    status, answer = ask()
    assert status == 200, answer
    assert json.loads(answer)["text_output"].startswith("answer ")


# -- rejected requests -------------------------------------------------------------------------

BAD_BODIES = [
    ({}, "give exactly one of text_input"),
    ({"messages": ""}, "give exactly one of text_input"),
    ({"text_input": 5}, "string"),
    ({"text_input": ["a", "b"]}, "shape"),
    ({"text_input": "a" * 3_000_000}, "must be more than 2047 tokens"),
    ({"text_input": "a b " * 3000}, "tokens: it must be 1 to 2047 long"),
    ({"text_input": "a", "temperature": "hot"}, "number"),
    ({"text_input": "a", "temperature": -1}, "temperature=-1.0 is out of range"),
    ({"text_input": "a", "max_tokens": 1.5}, "integer"),
    ({"text_input": "a", "max_tokens": 0}, "max_tokens=0 is out of range"),
    ({"text_input": "a", "stream": "yes"}, "boolean"),
    ({"text_input": "a", "temprature": 1}, "did you mean 'temperature'?"),
    ({"text_input": "a", "sampling_parameters": "{"}, "sampling_parameters: not valid JSON"),
    ({"text_input": "a", "parameters": {"control": "paint"}}, "control='paint': must be"),
    ({"text_input": "a", "parameters": {"control": "drain"}}, "control='drain': this server has no admin key"),
    ({"text_input": "a", "stop": ["x"] * 2 + [str(i) for i in range(2000)]}, "stop has 2001 strings: at most 1024"),
    ({"text_input": "a", "stop_token_ids": [99999]}, "not in the vocabulary"),
    ({"text_input": "a", "logit_bias": "{"}, "logit_bias='{': must be an object"),
    ({"text_input": "a", "lora_name": "x"}, "LoRA feature is not enabled."),
    ({"text_input": "a", "messages": "[]"}, "got text_input and messages: give exactly one"),
    ({"messages": "nope"}, "messages: not valid JSON"),
    ({"messages": '{"messages": [], "tool": []}'}, "messages: the object has the key 'tool': allowed are messages, t"),
    ({"input_ids": [-4]}, "token id -4 is not in the vocabulary"),
    ({"text_input": "a", "timeout": -4}, "timeout=-4"),
    (b"{", "error"),
]


@pytest.mark.parametrize(("body", "says"), BAD_BODIES)
def test_invalid_bodies_are_rejected(fake: TritonServer, body: Any, says: str) -> None:
    status, answer = post(fake, "generate", body)
    assert says in answer
    # Triton answers with 500 if it cannot parse the body itself (observed with 24.10).
    assert status == BACKEND_ERROR or (status == 500 and "JSON" in answer)


@pytest.mark.parametrize(
    ("inputs", "parameters", "says"),
    [
        ([text(b"a\xff")], {}, "text_input is not valid UTF-8: byte 0xff at 1"),
        ([text(), tensor("temperature", [float("nan")], "FP32")], {}, "temperature=nan: must be a finite number"),
        ([text(), tensor("temperature", [float("inf")], "FP32")], {}, "temperature=inf: must be a finite number"),
        ([text(), tensor("input_ids", [5], "INT32")], {}, "data-type"),
        ([tensor("text_input", [[b"a"]], "BYTES")], {}, "unexpected shape"),
        ([text(), tensor("sampling_parameters", [b"[1]"], "BYTES")], {}, "must be a JSON object"),
        ([text()], {"top_k": "many"}, "top_k='many': must be an integer"),
        ([text()], {"request_priority": "high"}, "request_priority='high'"),
        (
            [text(), *flags("stream"), tensor("exclude_input_in_output", [False], "BOOL")],
            {},
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
    ],
)
def test_invalid_grpc_requests_are_rejected(
    grpc: Grpc, inputs: list[Any], parameters: dict[str, Any], says: str
) -> None:
    grpc.send(*inputs, parameters=parameters)
    assert says in grpc.error()


# -- early ends ---------------------------------------------------------------------------------


def aborts(root: Path) -> int:
    path = root / "aborts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_grpc_cancellation_reaches_the_engine(fake: TritonServer, root: Path) -> None:
    before = aborts(root)
    grpc = Grpc(fake)
    for number in range(3):
        grpc.send(text(), *flags("stream"), request_id=str(number), **slow())
    for number in range(3):
        grpc.queues[str(number)].get(timeout=30)
    grpc.close(cancel=True)
    wait_for(lambda: aborts(root) == before + 3)


def test_a_client_that_hangs_up_reaches_the_engine(fake: TritonServer, root: Path) -> None:
    before = aborts(root)
    host, _, port = fake.http_address.rpartition(":")
    body = json.dumps({"text_input": PROMPT, "stream": True, **slow()["parameters"]}).encode()
    head = f"POST /v2/models/fake/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        assert b"200 OK" in connection.recv(4096)
    wait_for(lambda: aborts(root) == before + 1)


def test_deadline_over_grpc(grpc: Grpc) -> None:
    for seconds in (1.5, 6, 24):  # a busy machine may have no token in time
        grpc.send(text(), *flags("stream"), timeout=int(seconds * 1e6), **slow(tokens=3000))
        message = grpc.error()
        assert message.startswith(f"deadline exceeded: the request's timeout of {seconds:g} s ran out after ")
        if not message.endswith(" after 0 output tokens"):
            break
    else:
        raise AssertionError(message)
    assert grpc.queues["r"].qsize() > 0  # the tokens so far were sent


def test_deadline_over_http(fake: TritonServer) -> None:
    status, answer = post(fake, "generate", {"text_input": PROMPT, "timeout": 200_000, **slow()["parameters"]})
    assert (status, "deadline exceeded" in answer) == (BACKEND_ERROR, True)


def test_overload_is_unavailable_at_once(fake: TritonServer) -> None:
    grpc = Grpc(fake)
    for number in range(40):
        grpc.send(text(), *flags("stream"), request_id=str(number), **slow())
    messages = [grpc.error() for _ in range(40 - 32)]
    assert all("32 sequences are open and 32 are allowed" in message for message in messages)
    status, answer = post(fake, "generate", {"text_input": PROMPT})
    grpc.close(cancel=True)
    assert (status, "queue is full" in answer) == (BACKEND_ERROR, True)
    wait_for(lambda: post(fake, "generate", {"text_input": PROMPT})[0] == 200)


def test_a_request_that_kills_every_engine_is_found_while_30_others_complete(fake: TritonServer) -> None:
    wait_for_idle(fake)  # what an earlier test cancelled counts until the engine has heard of it
    deaths = series(fake, "inflight_engine_deaths_total")
    bystander = Grpc(fake)
    names = [str(number) for number in range(30)]  # with it as many as run at once
    for name in names:
        bystander.send(text(), *flags("stream"), request_id=name, **slow(tokens=150))
    firsts = {name: bystander.queues[name].get(timeout=30) for name in names}
    status, answer = post(fake, "generate", {"text_input": PROMPT, "tenant": "crash=2", "max_tokens": 9})
    texts = {joined([firsts[name], *bystander.take(name)]) for name in names}
    bystander.close()
    assert texts == {TOKENIZER.decode(fake_engine.echo(TOKENIZER.encode(PROMPT), 150))}
    assert series(fake, "inflight_engine_deaths_total") - deaths <= 7  # log2(32) + 2
    assert (status, "the engine process died while it ran this request, " in answer) == (BACKEND_ERROR, True)
    assert generate(fake)["text_output"] == PROMPT + ECHO


def series(server: TritonServer, name: str, **labels: str) -> float:
    """The value of one series of the model `fake` now."""
    text = "".join(f',{key}="{value}"' for key, value in labels.items())
    for key, value in scrape(server).items():
        found, _, rest = key.partition("{")
        if found == name and set(rest.rstrip("}").split(",")) == set(f'model="fake",version="1"{text}'.split(",")):
            return value
    raise AssertionError(f"/metrics has no {name} {labels}")


def wait_for_idle(server: TritonServer) -> None:
    """Until what earlier tests left behind has ended, in the engine as well."""
    wait_for(lambda: series(server, "inflight_requests_running") == 0)
    generate(server, max_tokens=1)


OF_REQUESTS = {
    ("vllm:generation_tokens_total",): 16,
    ("vllm:prompt_tokens_total",): len(TOKENIZER.encode(PROMPT)),
    ("vllm:time_to_first_token_seconds_count",): 1,
    ("vllm:e2e_request_latency_seconds_count",): 1,
    ("vllm:request_params_n_count",): 1,
    ("inflight_request_time_per_output_token_seconds_count",): 1,
    ("vllm:request_success_total", ("finished_reason", "length")): 1,
    ("vllm:request_success_total", ("finished_reason", "stop")): 0,
}
OF_STEPS = {
    ("vllm:time_per_output_token_seconds_count",): 15,
    ("vllm:inter_token_latency_seconds_count",): 15,
    ("vllm:inter_token_latency_seconds_bucket", ("le", "+Inf")): 15,
    ("vllm:inter_token_latency_seconds_bucket", ("le", "80")): 15,
    ("inflight_step_seconds_count",): 16,
}


def test_a_scrape_right_after_an_answer_includes_it(fake: TritonServer) -> None:
    def read(keys: dict[Any, int]) -> dict[Any, float]:
        return {key: series(fake, key[0], **dict(key[1:])) for key in keys}

    wait_for_idle(fake)
    steps_before = read(OF_STEPS)
    while time.sleep(1.2) or read(OF_STEPS) != steps_before:
        steps_before = read(OF_STEPS)
    for _ in range(3):
        before = read(OF_REQUESTS)
        generate(fake, max_tokens=16)
        after = read(OF_REQUESTS)
        assert {key: after[key] - before[key] for key in before} == OF_REQUESTS
    # Metrics of steps are published with an answer only if that takes little of the time.
    wait_for(lambda: read(OF_STEPS) == {key: value + 3 * OF_STEPS[key] for key, value in steps_before.items()})
    wait_for(lambda: series(fake, "vllm:num_requests_running") == 0)
    assert series(fake, "vllm:kv_cache_usage_perc") == 0
    assert series(fake, "vllm:cache_config_info", block_size="16", num_gpu_blocks="1000") == 1


def test_requests_that_end_with_an_error_are_counted_by_the_kind_of_it(fake: TritonServer) -> None:
    def unsuccessful() -> dict[str, float]:
        kinds = ("invalid", "refused", "shed", "draining", "failed", "poison", "cancelled", "timeout")
        return {kind: series(fake, "inflight_requests_unsuccessful_total", reason=kind) for kind in kinds}

    wait_for_idle(fake)
    before = unsuccessful()
    bodies = [
        {"temperature": -1},
        {"tenant": "refuse=INVALID_ARG"},
        {"tenant": "refuse=UNAVAILABLE"},
        {"tenant": "giveup=2"},
        {"tenant": "delay=0.05", "timeout": 150_000, "max_tokens": 1000},
    ]
    for body in bodies:
        assert post(fake, "generate", {"text_input": PROMPT, **body})[0] == BACKEND_ERROR
    now = unsuccessful()
    assert {kind: now[kind] - before[kind] for kind in now} == {
        "invalid": 2,
        "refused": 1,
        "shed": 0,
        "draining": 0,
        "failed": 1,
        "poison": 0,
        "cancelled": 0,
        "timeout": 1,
    }
    grpc = Grpc(fake)
    grpc.send(text(), *flags("stream"), **slow())
    grpc.queues["r"].get(timeout=30)
    grpc.close(cancel=True)
    wait_for(lambda: unsuccessful()["cancelled"] == before["cancelled"] + 1)


def test_deaths_and_restarts_of_the_engine_are_counted(fake: TritonServer) -> None:
    def counts() -> tuple[float, ...]:
        aborted = series(fake, "vllm:request_success_total", finished_reason="error")
        return *(series(fake, f"inflight_engine_{name}_total") for name in ("deaths", "restarts")), aborted

    wait_for_idle(fake)
    deaths, restarts, errors = counts()
    status, _ = post(fake, "generate", {"text_input": PROMPT, "tenant": "crash=2", "max_tokens": 9})
    assert status == BACKEND_ERROR
    assert (counts()[0], counts()[2]) == (deaths + 3, errors + 1)
    assert generate(fake)["text_output"] == PROMPT + ECHO
    assert counts()[1] == restarts + 3


# -- unloading (last: the model is gone) -------------------------------------------------------


def test_unload_under_load_leaves_no_engine(fake: TritonServer) -> None:
    grpc = Grpc(fake)
    for number in range(5):
        grpc.send(text(), *flags("stream"), request_id=str(number), **slow(tokens=60))
        grpc.queues[str(number)].get(timeout=30)
    processes = model_processes(fake, "fake")
    assert len(processes) >= 2  # stub, engine
    control = grpcclient.InferenceServerClient(fake.grpc_address)
    unloading = threading.Thread(target=control.unload_model, args=("fake",))
    unloading.start()
    for number in range(5):  # Triton lets requests in flight finish
        grpc.take(str(number))
    unloading.join(30)
    grpc.close()  # Triton keeps a model while a gRPC stream that used it is open
    wait_for(lambda: not control.is_model_ready("fake"))
    wait_for(lambda: not any(process.is_running() for process in processes))
