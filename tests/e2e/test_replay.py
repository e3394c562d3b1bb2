"""Engine processes that die or hang under requests, in a real tritonserver: no stream loses or repeats a token."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from faulty_engine import DIES, NANS, RAISES, write_interpreter
from model_entries import loaded
from processes_of import engine_processes, open_when_stopped, run_in_turns, tries
from wire import GrpcStream, Responses, gauges, post, wait_for

from inflight.sampling.unusable import UNUSABLE_LOGITS
from inflight_client import Client
from inflight_tools.launcher import TritonServer

MANY_KILLS = int(os.environ.get("INFLIGHT_TEST_KILLS", "3"))
PATIENCE = 120.0 + 30 * MANY_KILLS  # seconds that a client waits: without a spare one an engine takes a while
PROMPT = "def main(arguments): the list of names"

# Much of it leaves no choice, and is computed several tokens in a step.
NAMES = {
    "json": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["list", "set of names", "日本 ☃"]},
            "description": {"const": "a list of names, including some given before"},
            "names": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 9, "maxItems": 9},
        },
        "required": ["kind", "description", "names"],
        "additionalProperties": False,
    },
    "disable_any_whitespace": True,
}

# Each stream has one of these, and a seed and a length of its own.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.7, "prompt_logprobs": 1, "logprobs": 0},
    {"temperature": 0.8, "stop": ["e", "xyz"], "min_tokens": 30, "include_stop_str_in_output": True},
    {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "top_k": 40},
    {"temperature": 0.8, "bad_words": ["the", " list of"], "logit_bias": {"30": 2.0}, "min_p": 0.01},
    {"temperature": 1.0, "detokenize": False},
    {"temperature": 1.0, "n": 3, "ignore_eos": False, "stop_token_ids": [*range(5, 60)], "min_tokens": 3},
    {"temperature": 1.0, "n": 2, "structured_outputs": NAMES, "logprobs": 1},
]
FLAGS = ("finish_reason", "token_ids", "logprobs", "cumulative_logprob", "prompt_logprobs", "num_output_tokens")


def request(number: int, max_tokens: int) -> dict[str, Any]:
    """The request of a stream, up to 6 tokens shorter than `max_tokens`."""
    options = {
        "ignore_eos": True,
        "seed": number,
        "max_tokens": max_tokens - number % 7,
        **OPTIONS[number % len(OPTIONS)],
    }
    wanted = {f"return_{name}": True for name in FLAGS if name != "prompt_logprobs" or "prompt_logprobs" in options}
    if "logprobs" not in options:
        del wanted["return_logprobs"]
    stream = number % 9 != 8
    return {
        "text_input": PROMPT[: 12 + number % 20],
        "stream": stream,
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps(options),
        **wanted,
    }


def whole(chunks: list[dict[str, Any]]) -> list[Any]:
    """The output of each sequence of a stream, however it was cut into responses."""
    n = len(chunks[0]["token_counts"])
    texts, ids, logprobs = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)]
    for chunk in chunks:
        rest = [int(token) for token in chunk["token_ids"]]
        for index, count in enumerate(chunk["token_counts"]):
            texts[index] += chunk["text_output"][index]
            ids[index] += rest[: int(count)]
            del rest[: int(count)]
            if "logprobs" in chunk:
                logprobs[index] += json.loads(chunk["logprobs"][index]) or []
    ends = [
        (str(reason), float(total))
        for reason, total in zip(chunks[-1]["finish_reason"], chunks[-1]["cumulative_logprob"])
    ]
    return [
        texts,
        ids,
        logprobs,
        ends,
        [chunk.get("prompt_logprobs") for chunk in chunks if "prompt_logprobs" in chunk],
    ]


class Storm:
    """64 streams over gRPC and 16 over HTTP at the same time, of at most `max_tokens` tokens each.

    Attributes:
        num_responses: so far, of all streams.
        last: `time.monotonic()` of the latest.
    """

    def __init__(self, server: TritonServer, max_tokens: int) -> None:
        self._server = server
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self.num_responses = 0
        self.last = 0.0
        self.threads = ThreadPoolExecutor(20)
        self.answers = [self.threads.submit(self._grpc, first) for first in range(0, 64, 16)]
        self.answers += [self.threads.submit(self._http, number) for number in range(64, 80)]

    def _count(self, number: int) -> None:
        with self._lock:
            self.num_responses += number
            self.last = time.monotonic()

    def _grpc(self, first: int) -> list[Any]:
        with GrpcStream(self._server.grpc_address, "faulty") as stream:
            names = [str(number) for number in range(first, first + 16)]
            for name in names:
                stream.send(name, **request(int(name), self._max_tokens))
            while not all(stream.answers[name].finals or stream.answers[name].error for name in names):
                stream.events.get(timeout=PATIENCE)
                self._count(1)
            return [self._checked(stream.answers[name]) for name in names]

    @staticmethod
    def _checked(answer: Responses) -> list[Any]:
        assert (answer.error, answer.finals) == (None, 1)
        chunks = [{name: value.tolist() for name, value in chunk.items()} for chunk in answer.chunks]
        for chunk in chunks:
            for name in ("text_output", "finish_reason", "logprobs", "prompt_logprobs"):
                if name in chunk:
                    chunk[name] = [text.decode() for text in chunk[name]]
        return whole(chunks)

    def _http(self, number: int) -> list[Any]:
        body = request(number, self._max_tokens)
        url = f"http://{self._server.http_address}/v2/models/faulty/generate" + ("_stream" if body["stream"] else "")
        chunks = []
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode()), timeout=PATIENCE
        ) as response:
            for line in response:
                if line.startswith((b"data:", b"{")):
                    self._count(1)
                    chunk = json.loads(line.removeprefix(b"data:"))
                    assert "error" not in chunk, chunk
                    chunks.append({key: value if isinstance(value, list) else [value] for key, value in chunk.items()})
        return [whole(chunks)]

    @property
    def is_over(self) -> bool:
        return all(answer.done() for answer in self.answers)

    def results(self) -> list[Any]:
        """The output of each stream, by its number."""
        found = [one for answer in self.answers for one in answer.result(timeout=2 * PATIENCE)]
        self.threads.shutdown()
        return found


@pytest.fixture(scope="module")
def faulty(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The demo's checkpoint in an engine process that poison can kill."""
    options = {
        "python_executable": str(write_interpreter(tmp_path_factory.mktemp("faulty"))),
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "engine_timeout": 5,
    }
    with loaded(triton, faulty=options) as server:
        yield server


def engine_of(server: TritonServer, *not_these: psutil.Process) -> psutil.Process:
    """The engine process, as soon as it is none of these."""
    return wait_for(lambda: [process for process in engine_processes(server, "faulty") if process not in not_these])[0]


def count(server: TritonServer, name: str) -> float:
    return gauges(server.metrics_address, "faulty").get(name, 0.0)


def stop_after(engine: psutil.Process, storm: Storm, num_responses: int) -> None:
    """Stop the engine in the middle of whatever it does, so many responses later or at the end."""
    wanted = storm.num_responses + num_responses

    def done(_: float) -> bool:
        wait_for(lambda: time.monotonic() - storm.last > 0.05)
        return storm.num_responses >= wanted or storm.is_over

    run_in_turns(engine, done, 0.03)


@pytest.mark.parametrize("num_kills", [1, pytest.param(MANY_KILLS, marks=pytest.mark.nightly)])
def test_killed_engines_lose_no_token_of_80_streams(faulty: TritonServer, num_kills: int) -> None:
    max_tokens = 40 + 12 * num_kills
    expected = Storm(faulty, max_tokens).results()
    assert {reason for answer in expected for reason, _ in answer[3]} == {"length", "stop"}
    moments = random.Random(num_kills)

    def are_interrupted() -> bool:
        replayed = count(faulty, "inflight_requests_replayed_total")
        engine = engine_of(faulty)
        engine.suspend()
        storm, interrupted = Storm(faulty, max_tokens), 0
        for _ in range(num_kills):
            stop_after(engine, storm, moments.randint(40, 400))
            with Client(faulty.grpc_address, model="faulty") as client:
                interrupted += open_when_stopped(client) > 0
            engine.kill()
            killed = time.monotonic()
            engine = engine_of(faulty, engine)
            wait_for(lambda killed=killed: storm.last > killed + 0.1 or storm.is_over)
            print(f"{storm.last - killed:.2f} s from a kill to the next response", flush=True)
        results = storm.results()
        for number, (found, wanted) in enumerate(zip(results, expected)):
            assert found == wanted, f"stream {number}: {request(number, max_tokens)}"
        wait_for(lambda: count(faulty, "inflight_requests_running") == count(faulty, "inflight_kv_blocks_used") == 0)
        assert count(faulty, "inflight_requests_replayed_total") >= replayed + interrupted
        return interrupted == num_kills

    assert any(are_interrupted() for _ in tries())


@pytest.mark.nightly  # test_watchdog.py stops an engine; the server only waits for longer
def test_a_stopped_engine_is_replaced_and_no_stream_notices(faulty: TritonServer) -> None:
    def ask(stream: GrpcStream, name: str) -> None:
        options = {"max_tokens": 120, "ignore_eos": True, "temperature": 0}
        stream.send(name, text_input=PROMPT, stream=True, return_token_ids=True, sampling_parameters=options)

    with GrpcStream(faulty.grpc_address, "faulty") as stream:
        names = [str(number) for number in range(20)]
        ask(stream, "alone")
        stream.wait("alone")

        def is_replaced() -> bool:
            replayed = count(faulty, "inflight_requests_replayed_total")
            engine = engine_of(faulty)
            engine.suspend()
            for name in names:
                ask(stream, name)
            run_in_turns(engine, lambda seconds: stream.has_chunks("0", 2, seconds))
            stream.wait(*names)
            alone = tuple(stream.answers["alone"].token_ids)
            assert {tuple(stream.answers[name].token_ids) for name in names} == {alone}
            if count(faulty, "inflight_requests_replayed_total") == replayed:  # they ended before it was stopped
                engine.resume()
                return False
            assert engine_of(faulty) != engine
            return True

        assert any(is_replaced() for _ in tries())


@pytest.mark.nightly
def test_an_engine_that_dies_within_forced_tokens_costs_no_token(faulty: TritonServer) -> None:
    deaths = count(faulty, "inflight_engine_deaths_total")
    with GrpcStream(faulty.grpc_address, "faulty") as stream:
        for name in ("disturbed", "alone"):  # the engine dies once
            options = {"max_tokens": 150, "n": 2, "seed": 1, "structured_outputs": NAMES}
            stream.send(
                name,
                input_ids=[DIES, 30, 5],
                stream=True,
                return_token_ids=True,
                return_finish_reason=True,
                sampling_parameters=options,
            )
            stream.wait(name)
            assert stream.answers[name].error is None
        assert count(faulty, "inflight_engine_deaths_total") - deaths == 1
        disturbed, alone = (stream.answers[name] for name in ("disturbed", "alone"))
        sequences = [alone.sequence(index) for index in range(2)]
        assert [disturbed.sequence(index) for index in range(2)] == sequences
        assert disturbed.chunks[-1]["finish_reason"].tolist() == alone.chunks[-1]["finish_reason"].tolist()
        # Fewer responses than tokens: some of these came together.
        assert len(alone.chunks) < max(map(len, sequences)) - 10


def test_a_row_of_nan_ends_its_request_alone(faulty: TritonServer) -> None:
    deaths = count(faulty, "inflight_engine_deaths_total")
    with GrpcStream(faulty.grpc_address, "faulty") as stream:
        options = {"max_tokens": 60, "ignore_eos": True, "temperature": 0, "n": 2}
        for name in ("alone", "beside"):
            stream.send(name, text_input=PROMPT, stream=True, return_token_ids=True, sampling_parameters=options)
            stream.wait_chunks(name, 2)
            for more in [{}, {"structured_outputs": NAMES}, {"n": 2, "temperature": 1.0}] if name == "beside" else []:
                body = {"input_ids": [NANS, 5, 6], "parameters": {"max_tokens": 9, "ignore_eos": True, **more}}
                body["sampling_parameters"] = json.dumps(body.pop("parameters"))
                status, answer = post(f"http://{faulty.http_address}/v2/models/faulty/generate", body)
                assert (status, json.loads(answer)["error"]) == (400, UNUSABLE_LOGITS)
            stream.wait(name)
            assert (stream.answers[name].error, stream.answers[name].finals) == (None, 1)
        assert [stream.answers["beside"].sequence(k) for k in range(2)] == [
            stream.answers["alone"].sequence(k) for k in range(2)
        ]
    assert count(faulty, "inflight_engine_deaths_total") == deaths
    wait_for(lambda: count(faulty, "inflight_kv_blocks_used") == 0)


@pytest.mark.nightly  # four engine processes start
def test_a_request_that_ends_the_engine_with_an_error_of_the_device_fails_alone(faulty: TritonServer) -> None:
    deaths = count(faulty, "inflight_engine_deaths_total")
    with GrpcStream(faulty.grpc_address, "faulty") as stream, ThreadPoolExecutor(1) as threads:
        options = {"max_tokens": 600, "ignore_eos": True, "temperature": 0}
        stream.send("other", text_input=PROMPT, stream=True, return_token_ids=True, sampling_parameters=options)
        stream.wait_chunks("other", 1)
        body = {"input_ids": [RAISES, 5, 6], "parameters": {"max_tokens": 9, "ignore_eos": True}}
        url = f"http://{faulty.http_address}/v2/models/faulty/generate"
        status, answer = threads.submit(post, url, body, timeout=200).result()
        stream.wait("other", timeout=100)
        assert (stream.answers["other"].error, len(stream.answers["other"].token_ids)) == (None, 600)
    assert status == 400
    assert "the engine process died while it ran this request, 4 times in a row (engine step failed: Runtime" in answer
    assert "CUDA error: device-side assert triggered); it is not replayed again (max_replays=2)" in answer
    assert count(faulty, "inflight_engine_deaths_total") - deaths == 4
