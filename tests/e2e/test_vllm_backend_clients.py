"""The requests of vllm_backend's sample client and tests, to the demo model of a real server."""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
from processes_of import engine_process, stopped
from tritonclient.utils import InferenceServerException
from wire import gauges, post, wait_for

from inflight_tools.launcher import TritonServer

PROMPTS = ["Return a list of", "Raise ValueError if", "This module provides"]
GREEDY = {"temperature": "0", "top_p": "1"}


def tensor(name: str, value: str | bool) -> grpcclient.InferInput:
    """An input of one element."""
    is_text = isinstance(value, str)
    found = grpcclient.InferInput(name, [1], "BYTES" if is_text else "BOOL")
    found.set_data_from_numpy(np.array([value.encode()], dtype=object) if is_text else np.array([value]))
    return found


def request(prompt: str, stream: bool, parameters: dict[str, Any], *, as_tensor: bool = True, **flags: Any) -> dict:
    """Arguments of a request: the parameters as an input, or as request parameters alone."""
    inputs = [tensor("text_input", prompt), tensor("stream", stream)]
    if as_tensor:
        inputs.append(tensor("sampling_parameters", json.dumps(parameters)))
    inputs += [tensor(name, value) for name, value in flags.items() if value is not None]
    return {"model_name": "demo", "inputs": inputs, "parameters": {k: str(v) for k, v in parameters.items()}}


def infer(server: TritonServer, *requests: dict) -> list[Any]:
    """All results and errors of requests on one stream, in the order in which they came."""
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for sent in requests:
            client.async_stream_infer(**sent)
        client.stop_stream()
    return [answers.get_nowait() for _ in range(answers.qsize())]


def text(results: list[Any]) -> str:
    return "".join(result.as_numpy("text_output")[0].decode() for result in results)


@pytest.fixture(scope="module")
def expected(server: TritonServer) -> dict[str, str]:
    """Prompt -> its greedy output, asked for one at a time."""
    return {
        prompt: text(infer(server, request(prompt, False, GREEDY, exclude_input_in_output=True))) for prompt in PROMPTS
    }


@pytest.mark.parametrize(("stream", "exclude"), [(False, False), (False, True), (True, True)])
def test_the_sample_client(server: TritonServer, expected: dict[str, str], stream: bool, exclude: bool) -> None:
    """It sends every line of a file several times, numbered, and collects the texts by number."""
    parameters = {"temperature": "0.0", "top_p": "0.95", "max_tokens": "16"}
    texts: dict[str, str] = {}

    async def requests() -> AsyncIterator[dict]:
        for number, prompt in enumerate(PROMPTS * 2):
            texts[str(number)] = ""
            sent = request(prompt, stream, parameters, exclude_input_in_output=exclude)
            yield {**sent, "outputs": [aioclient.InferRequestedOutput("text_output")], "request_id": str(number)}

    async def run() -> None:
        async with aioclient.InferenceServerClient(server.grpc_address) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                for part in result.as_numpy("text_output"):
                    texts[result.get_response().id] += part.decode()

    asyncio.run(run())
    prompts = dict(enumerate(PROMPTS * 2))
    assert texts == {str(k): ("" if exclude else p) + expected[p] for k, p in prompts.items()}


@pytest.mark.parametrize("as_tensor", [True, False])
def test_parameters_as_an_input_or_with_the_request(
    server: TritonServer, expected: dict[str, str], as_tensor: bool
) -> None:
    results = infer(server, *(request(prompt, False, GREEDY, as_tensor=as_tensor) for prompt in PROMPTS))
    assert sorted(text([result]) for result in results) == sorted(p + expected[p] for p in PROMPTS)


def test_a_stream_of_differences(server: TritonServer, expected: dict[str, str]) -> None:
    prompt = PROMPTS[0]
    assert text(infer(server, request(prompt, True, GREEDY))) == expected[prompt]
    (error,) = infer(server, request(prompt, True, GREEDY, exclude_input_in_output=False))
    message = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    assert error.message() == message


ADDITIONAL = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_additional_outputs(server: TritonServer, stream: bool, logprobs: int | None) -> None:
    """Each of the outputs is there exactly if it was asked for, and fits the text."""
    prompt = PROMPTS[0]
    for wanted in [*itertools.combinations(ADDITIONAL, 1), ADDITIONAL, ()]:
        parameters = GREEDY if logprobs is None else {**GREEDY, "logprobs": logprobs}
        flags = {f"return_{name}": name in wanted for name in ADDITIONAL if name in wanted or wanted}
        results = infer(server, request(prompt, stream, parameters, **flags))
        found = {name: [result.as_numpy(name) for result in results] for name in ADDITIONAL}
        assert {name for name, arrays in found.items() if all(a is not None for a in arrays)} == set(wanted)
        assert {name for name, arrays in found.items() if any(a is not None for a in arrays)} == set(wanted)
        if "finish_reason" in wanted:
            reasons = [array[0] for array in found["finish_reason"]]
            assert reasons == [b"None"] * (len(results) - 1) + [b"length"]
        if "cumulative_logprob" in wanted:
            sums = [float(array[0]) for array in found["cumulative_logprob"]]
            assert sums == sorted(sums, reverse=True)
            assert sums[0] < 0
        if "num_input_tokens" in wanted:
            assert all(0 < int(array[0]) <= len(prompt) for array in found["num_input_tokens"])
        if "num_output_tokens" in wanted:
            assert sum(int(array[0]) for array in found["num_output_tokens"]) == 16
        if "logprobs" in wanted:
            check_logprobs(results, logprobs, "" if stream else prompt)


def check_logprobs(results: list[Any], logprobs: int | None, before: str) -> None:
    entries = [json.loads(result.as_numpy("logprobs")[0]) for result in results]
    if logprobs is None:
        assert entries == [None] * len(results)
        return
    for result, rows in zip(results, entries):
        assert all(1 <= len(row) <= logprobs + 1 for row in rows)
        first = [[entry for entry in row.values() if entry["rank"] == 1] for row in rows]
        assert all(len(of_rank_1) == 1 for of_rank_1 in first), "greedy output: the chosen token is the most likely"
        assert all(set(entry) == {"logprob", "rank", "decoded_token"} for row in rows for entry in row.values())
        spelt = "".join(entry["decoded_token"] for (entry,) in first)
        assert before + spelt == result.as_numpy("text_output")[0].decode()


def test_request_cancellation(server: TritonServer) -> None:
    """A request without streaming, cancelled while it runs: its client gets CANCELLED, the log one INFO line."""
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_address) as client:

        def started() -> int:
            return client.get_inference_statistics("demo").model_stats[0].inference_stats.queue.count

        before = started()
        client.start_stream(lambda result, error: answers.put(error or result))
        parameters = {"temperature": "0", "max_tokens": "2000", "ignore_eos": True}
        with stopped([engine_process(server, "demo")]):  # so that the request cannot end by itself
            client.async_stream_infer(**request(PROMPTS[0], False, parameters), request_id="a long poem")
            # Cancelled before it reaches the backend, it would never be a request there.
            wait_for(lambda: started() > before)
            client.stop_stream(cancel_requests=True)
            error = answers.get(timeout=30)
    assert isinstance(error, InferenceServerException)
    assert error.status() == "StatusCode.CANCELLED"
    assert answers.empty()
    line = (
        r"I\d{4} .*\[inflight\] Cancelling the request \d+ 'a long poem' after \d+ output tokens: Request was cancelled"
    )
    wait_for(lambda: re.search(line, server.log_text()))
    assert server.log_text().count("'a long poem'") == 1


def test_metrics(server: TritonServer) -> None:
    """Two rounds of three prompts move every counter and histogram of vllm_backend by what was served."""

    def scrape() -> dict[str, float]:
        return {name: value for name, value in gauges(server.metrics_address, "demo").items() if "vllm:" in name}

    def is_settled() -> bool:
        first = scrape()
        time.sleep(1.1)  # longer than from one publication to the next
        return scrape() == first

    wait_for(is_settled)
    before = scrape()
    count = num_input_tokens = num_output_tokens = 0
    for _ in range(2):
        flags = {"return_num_input_tokens": True, "return_num_output_tokens": True}
        results = infer(server, *(request(prompt, False, GREEDY, **flags) for prompt in PROMPTS))
        count += len(results)
        num_input_tokens += sum(int(result.as_numpy("num_input_tokens")[0]) for result in results)
        num_output_tokens += sum(int(result.as_numpy("num_output_tokens")[0]) for result in results)
    moved = {
        "vllm:generation_tokens_total": num_output_tokens,
        "vllm:time_to_first_token_seconds_count": count,
        "vllm:e2e_request_latency_seconds_count": count,
        "vllm:request_prompt_tokens_count": count,
        "vllm:request_prompt_tokens_sum": num_input_tokens,
        "vllm:request_generation_tokens_count": count,
        "vllm:request_generation_tokens_sum": num_output_tokens,
        "vllm:request_params_n_count": count,
    }
    wait_for(lambda: all(scrape()[name] - before.get(name, 0.0) == value for name, value in moved.items()))
    assert scrape()["vllm:time_per_output_token_seconds_count"] > before.get(
        "vllm:time_per_output_token_seconds_count", 0
    )


def test_requests_of_tritons_openai_frontend(server: TritonServer, expected: dict[str, str]) -> None:
    """For the backend `vllm` it passes on every field of the OpenAI request that has a value, defaults included."""
    parameters = {
        "frequency_penalty": 0.0,
        "logprobs": False,
        "n": 1,
        "presence_penalty": 0.0,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 16,
    }
    flags = {"return_num_input_tokens": True, "return_num_output_tokens": True, "exclude_input_in_output": True}
    for stream in (False, True):
        results = infer(server, request(PROMPTS[0], stream, parameters, **flags))
        assert text(results) == expected[PROMPTS[0]]
        for name in ("num_input_tokens", "num_output_tokens"):
            assert all(result.as_numpy(name).dtype == np.uint32 for result in results)


@pytest.mark.parametrize(
    ("key", "value", "check"),
    [
        ("allowed_token_ids", [300, 301], lambda answer, text: set(answer["token_ids"]) <= {300, 301}),
        ("detokenize", False, lambda answer, text: answer["text_output"] == "" and len(answer["token_ids"]) == 16),
        ("flat_logprobs", True, lambda answer, text: answer["text_output"] == text),
        ("output_kind", 2, lambda answer, text: answer["text_output"] == text),
        ("truncate_prompt_tokens", 4, lambda answer, text: answer["num_input_tokens"] == 4),
    ],
)
def test_further_keys_of_vllm(
    server: TritonServer, expected: dict[str, str], key: str, value: Any, check: Callable[[dict, str], bool]
) -> None:
    body = {
        "text_input": PROMPTS[0],
        "sampling_parameters": json.dumps({**GREEDY, key: value}),
        "exclude_input_in_output": True,
        "return_token_ids": True,
        "return_num_input_tokens": True,
    }
    status, answer = post(f"http://{server.http_address}/v2/models/demo/generate", body)
    assert status == 200, answer
    assert check(json.loads(answer), expected[PROMPTS[0]]), answer


def test_an_empty_prompt_is_the_start_token(server: TritonServer) -> None:
    body = {"text_input": "", "return_num_input_tokens": True, "temperature": 0}
    status, answer = post(f"http://{server.http_address}/v2/models/demo/generate", body)
    assert (status, json.loads(answer)["num_input_tokens"]) == (200, 1), answer
