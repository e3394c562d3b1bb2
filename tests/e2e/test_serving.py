"""The real engine in a real tritonserver: what clients get, and what is left when it ends."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator

import psutil
import pytest
import tritonclient.grpc as grpc
from checkpoints import VOCAB, make_checkpoint
from model_entries import keep_weights, load, loaded, wait_unloaded, write_entry
from offline import make_core, run, tokens
from processes_of import (
    command_line,
    engine_process,
    engine_processes,
    open_when_stopped,
    run_in_turns,
    stopped,
    tries,
)
from tritonclient.utils import InferenceServerException
from wire import GrpcStream, Responses, gauges, post, server_sent_events, wait_for

from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.text.tokenizer import Tokenizer
from inflight_client import Client, InvalidRequestError
from inflight_tools.launcher import TritonServer

GAP_MARKS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A tiny random llama with a tokenizer of single characters (id = code point, capped) and marks of gaps."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Fast
    from tokenizers.decoders import Fuse
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import Split

    path = make_checkpoint("llama", tmp_path_factory.mktemp("serving"))
    entries = [chr(i + 33) for i in range(VOCAB - len(GAP_MARKS))] + GAP_MARKS
    fast = Fast(BPE({entry: i for i, entry in enumerate(entries)}, [], unk_token="!"))
    fast.add_tokens([AddedToken(mark, normalized=False) for mark in GAP_MARKS])
    fast.pre_tokenizer = Split("", "isolated")
    fast.decoder = Fuse()
    fast.save(f"{path}/tokenizer.json")
    return path


@pytest.fixture(scope="module")
def entries(checkpoint: str) -> dict[str, dict[str, object]]:
    """Options of the module's models."""
    options = {"model": checkpoint, "max_num_seqs": 64, "max_num_batched_tokens": 96}
    return {
        "tiny": {**options, "trust_request_chat_template": True},
        "narrow": {**options, "max_num_seqs": 1, "max_queue_size": 2, "spare_engine": False},
    }


@pytest.fixture(scope="module")
def serving(triton, keeping, entries) -> Iterator[TritonServer]:
    keep_weights(keeping["INFLIGHT_CACHE"], model=entries["tiny"]["model"])
    with loaded(triton, **entries) as server:
        yield server


def mixed_requests(count: int) -> list[tuple[list[int], dict]]:
    rng = random.Random(99)
    requests = []
    for index in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 10, 40, 120]))]
        params: dict = {"max_tokens": rng.choice([1, 5, 20, 60]), "ignore_eos": True, "seed": index}
        params |= rng.choice(
            [
                {"temperature": 0},
                {"temperature": 0.8, "top_k": 30},
                {"temperature": 1.1, "top_p": 0.9, "presence_penalty": 0.5},
                {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.1, "n": 2},
            ]
        )
        requests.append((prompt, params))
    return requests


def test_64_concurrent_mixed_requests_get_the_offline_tokens(serving, checkpoint):
    requests = mixed_requests(64)
    offline = run(
        make_core(checkpoint, max_num_seqs=64),
        [prompt for prompt, _ in requests],
        [SamplingParams(**params) for _, params in requests],
    )
    streams = [GrpcStream(serving.grpc_address, "tiny") for _ in range(4)]
    for index, (prompt, params) in enumerate(requests):
        streams[index % 4].send(
            str(index), input_ids=prompt, stream=index % 3 > 0, sampling_parameters=params,
            return_token_ids=True, return_num_output_tokens=True, return_finish_reason=True,
            exclude_input_in_output=True,
        )  # fmt: skip
    for number, stream in enumerate(streams):
        stream.wait(*(str(i) for i in range(64) if i % 4 == number))
        stream.close()
    tokenizer = Tokenizer.load(checkpoint)
    for index, (_prompt, params) in enumerate(requests):
        answer = streams[index % 4].answers[str(index)]
        assert answer.error is None
        assert answer.finals == 1
        for sequence in range(params.get("n", 1)):
            expected = tokens(offline[index, sequence])
            assert answer.sequence(sequence) == expected, f"request {index}, sequence {sequence}"
            text = b"".join(chunk["text_output"][sequence] for chunk in answer.chunks).decode()
            assert text == tokenizer.decode(expected)
        assert all(reason == b"length" for reason in answer.chunks[-1]["finish_reason"])
        if index % 3 == 0:
            assert len(answer.chunks) == 1, "a request without streaming gets one response"


def test_http_generate_and_generate_stream_give_the_same_as_grpc(serving, checkpoint):
    url = f"http://{serving.http_address}/v2/models/tiny"
    body = {"text_input": "Hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    expected = tokens(
        run(
            make_core(checkpoint),
            [Tokenizer.load(checkpoint).encode("Hello")],
            [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)],
        )[0, 0]
    )
    status, answer = post(f"{url}/generate", body)
    assert status == 200, answer
    assert json.loads(answer)["token_ids"] == expected
    assert json.loads(answer)["text_output"].startswith("Hello"), "vllm_backend's default: the prompt comes first"
    status, answer = post(f"{url}/generate_stream", {**body, "stream": True})
    assert status == 200, answer
    events = server_sent_events(answer)
    got = [e["token_ids"] if isinstance(e["token_ids"], list) else [e["token_ids"]] for e in events]
    assert [token for part in got for token in part] == expected
    with GrpcStream(serving.grpc_address, "tiny") as stream:
        stream.send(
            "g", text_input="Hello", stream=True, return_token_ids=True,
            sampling_parameters={"max_tokens": 12, "temperature": 0, "ignore_eos": True},
        )  # fmt: skip
        stream.wait("g")
        assert stream.answers["g"].token_ids == expected
        assert stream.answers["g"].text == "".join(e["text_output"] for e in events)


def long_request(stream: GrpcStream, request_id: str, max_tokens: int = 240, **inputs: object) -> None:
    stream.send(
        request_id, input_ids=[1, 2, 3], stream=True, return_token_ids=True,
        sampling_parameters={"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}, **inputs,
    )  # fmt: skip


def test_the_tokenizer_tells_how_gaps_are_filled(serving):
    with Client(serving.grpc_address, model="tiny") as client:
        told = client.model_info()
        assert told["fim_template"] == "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>"
        prompt = told["fim_template"].format(prefix="ab", suffix="c")
        a, b, c = (ord(character) - 33 for character in "abc")
        prefix, suffix, middle, end = range(VOCAB - len(GAP_MARKS), VOCAB)
        assert client.tokenize(prompt)["tokens"] == [prefix, a, b, suffix, c, middle]
        only_end = {"allowed_token_ids": [end], "stop_token_ids": told["fim_stop_token_ids"], "max_tokens": 5}
        answer = client.generate(prompt, **only_end)
        assert (answer.text, answer.finish_reason, answer.usage.output_tokens) == ("", "stop", 1)


def test_a_request_brings_its_chat_template_only_if_the_model_takes_it(serving):
    chat = {"messages": [{"role": "user", "content": "b"}], "chat_template": "a{{ messages[0].content }}"}
    with Client(serving.grpc_address) as client:
        assert client.tokenize(**chat, model="tiny")["tokens"] == [ord(character) - 33 for character in "ab"]
        assert client.generate(**chat, model="tiny", max_tokens=2).usage.input_tokens == 2
        for ask in (client.tokenize, client.generate):
            with pytest.raises(InvalidRequestError, match="no chat template"):
                ask(**chat, model="narrow")


def test_beyond_max_queue_size_requests_are_refused_at_once(serving):
    """One may run and two may wait: of six requests three are refused before any has ended."""
    streams = [GrpcStream(serving.grpc_address, "narrow") for _ in range(6)]
    with stopped(engine_processes(serving, "narrow")):  # so none finishes before the last one arrives
        for stream in streams:
            long_request(stream, "r")
        answers = [stream.answers["r"] for stream in streams]
        wait_for(lambda: sum(answer.error is not None for answer in answers) == 3)
        assert not any(answer.finals for answer in answers)
    for stream in streams:
        stream.wait("r")
        stream.close()
    refusals = [answer.error.message() for answer in answers if answer.error is not None]
    assert len(refusals) == 3
    assert all("the queue is full" in text and "max_queue_size" in text for text in refusals)
    assert all(len(answer.token_ids) == 240 for answer in answers if answer.error is None)


@pytest.mark.nightly
def test_unload_waits_for_open_requests_and_a_reload_serves_again(serving):
    """With model `narrow`: one of its streams runs, and the others wait."""
    with GrpcStream(serving.grpc_address, "narrow") as stream:
        for index in range(3):
            long_request(stream, str(index))
        stream.wait_chunks("0", 1)
        with grpc.InferenceServerClient(serving.grpc_address) as control:
            control.unload_model("narrow")
        stream.wait("0", "1", "2")
        ended = [len(a.token_ids) == 240 or a.error is not None for a in stream.answers.values()]
        assert all(ended), "every stream ends, with all its tokens or with an error"
    wait_unloaded(serving, "narrow")
    assert engine_processes(serving, "tiny")
    load(serving, "narrow")
    with GrpcStream(serving.grpc_address, "narrow") as stream:
        long_request(stream, "again", max_tokens=5)
        stream.wait("again")
        assert len(stream.answers["again"].token_ids) == 5


def test_a_killed_engine_loses_no_token_of_any_stream(serving):
    def are_interrupted() -> bool:
        before = replayed(serving)
        address = serving.grpc_address
        with GrpcStream(address, "tiny") as stream, Client(address, model="tiny") as client:
            engine = engine_process(serving, "tiny")
            engine.suspend()
            names = [str(index) for index in range(192)]
            for name in names:
                long_request(stream, name)
            run_in_turns(engine, lambda seconds: stream.has_chunks("0", 1, seconds))
            was_open = open_when_stopped(client)
            engine.kill()
            for name in names:
                stream.wait(name, timeout=90)
            assert [stream.answers[name].error for name in names] == [None] * len(names)
            assert {len(stream.answers[name].token_ids) for name in names} == {240}
        assert was_open < 2 or replayed(serving) - before >= 2
        return was_open >= 2

    assert any(are_interrupted() for _ in tries())
    with GrpcStream(serving.grpc_address, "tiny") as stream:
        long_request(stream, "next", max_tokens=5)
        stream.wait("next")
        assert len(stream.answers["next"].token_ids) == 5


def replayed(server: TritonServer) -> float:
    return gauges(server.metrics_address, "tiny").get("inflight_requests_replayed_total", 0.0)


def generated(server: TritonServer, model: str = "tiny") -> float:
    return gauges(server.metrics_address, model).get("vllm:generation_tokens_total", 0.0)


def settle(server: TritonServer) -> float:
    """Tokens generated so far, once the metrics of everything before are published."""

    def settled() -> bool:
        first = generated(server)
        time.sleep(1.1)  # longer than from one publication to the next
        return generated(server) == first

    wait_for(settled)
    return generated(server)


def test_a_cancelled_stream_stops_the_engine_and_frees_its_blocks(serving):
    before = settle(serving)
    stream = GrpcStream(serving.grpc_address, "tiny")
    long_request(stream, "0")
    stream.wait_chunks("0", 1)
    with stopped(engine_processes(serving, "tiny")), Client(serving.grpc_address, model="tiny") as client:
        for index in range(1, 300):
            long_request(stream, str(index))
        stream.close(cancel=True)
        wait_for(lambda: not json.loads(client.control("stats"))["frontend"]["open_requests"])
    assert settle(serving) - before < 300 * 240, "the engine ran to the end"
    now = gauges(serving.metrics_address, "tiny")
    assert (now["inflight_requests_running"], now["inflight_kv_blocks_used"]) == (0, 0)


def test_a_deadline_ends_its_request_and_no_other(serving):
    engines = engine_processes(serving, "narrow")
    # On a stream of its own: Triton does not say which request of a stream an error is about.
    with GrpcStream(serving.grpc_address, "narrow") as stream, GrpcStream(serving.grpc_address, "narrow") as other:
        long_request(other, "ahead")
        with stopped(engines):  # so nothing is computed before the deadline
            long_request(stream, "late", timeout=150_000)
            stream.wait("late", timeout=30)
        other.wait("ahead", timeout=30)
    assert other.answers["ahead"].error is None
    error = stream.answers["late"].error
    assert "deadline exceeded" in error.message()
    assert "0.15 s ran out after 0 output tokens" in error.message()


def test_metrics_count_what_was_served(serving):
    """Right after the last answer, and as often as vLLM would, regardless of cached or recomputed tokens."""

    def served() -> dict[str, float]:
        return gauges(serving.metrics_address, "tiny")

    settle(serving)
    before = served()
    with GrpcStream(serving.grpc_address, "tiny") as stream:
        for index, n in enumerate((1, 1, 3)):
            params = {"max_tokens": 7, "ignore_eos": True, "n": n}
            stream.send(str(index), input_ids=[5] * 40, sampling_parameters=params, exclude_input_in_output=True)
            stream.wait(str(index))
    now = served()
    added = {name: value - before.get(name, 0.0) for name, value in now.items()}
    assert added["vllm:generation_tokens_total"] == 5 * 7
    assert added["vllm:prompt_tokens_total"] == 3 * 40, "once for each request, with what was cached"
    assert added["vllm:request_params_n_count"] == 3
    assert added["vllm:request_success_total"] == 5
    settle(serving)
    now = served()
    computed = now["inflight_prompt_tokens_computed_total"] - before.get("inflight_prompt_tokens_computed_total", 0.0)
    assert 40 < computed < 3 * 40
    assert now["vllm:prefix_cache_hits_total"] > before.get("vllm:prefix_cache_hits_total", 0.0)
    for ours, theirs in (("requests_preempted", "num_preemptions"), ("prefix_cache_hits", "prefix_cache_hits")):
        assert now[f"inflight_{ours}_total"] == now[f"vllm:{theirs}_total"]
    assert now["inflight_requests_running"] == 0
    assert now["inflight_kv_blocks_used"] == now["vllm:kv_cache_usage_perc"] == 0
    assert now["inflight_kv_blocks_free"] > 0


@pytest.mark.nightly
def test_shutdown_under_load_leaves_nothing(triton_installed, checkpoint, tmp_path):
    write_entry(tmp_path, "tiny", model=checkpoint)
    server = TritonServer(tmp_path, exit_timeout=3)
    with server:
        prefix = server.shm_prefix
        stream = GrpcStream(server.grpc_address, "tiny")
        for index in range(8):
            long_request(stream, str(index))
        stream.wait_chunks("7", 1)
        family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        assert any("inflight.worker" in command_line(p) for p in family)
    wait_for(lambda: not any(process.is_running() for process in family))
    assert not [name for name in os.listdir("/dev/shm") if prefix and prefix in name]
    assert all(isinstance(answer, Responses) for answer in stream.answers.values())


def fails_to_load(server: TritonServer, name: str, reason: str, options: dict[str, object]) -> None:
    write_entry(server.repositories[0], name, **options)
    with pytest.raises(InferenceServerException) as failure:
        load(server, name)
    assert reason in failure.value.message()


@pytest.mark.nightly
def test_a_pool_that_is_too_small_fails_the_load_with_the_reason(serving, entries):
    fails_to_load(serving, "small", "more; raise kv_cache_memory", {**entries["tiny"], "kv_cache_memory": "4KiB"})
