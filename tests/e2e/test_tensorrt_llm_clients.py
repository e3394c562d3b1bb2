"""The requests of TensorRT-LLM's example client for its `ensemble`, option by option, to the entry of that name."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from frontend_rig import demo_tokenizer
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from wire import GrpcStream, Responses, post, server_sent_events

from inflight_tools.launcher import TritonServer

PROMPT = "Return a list of"
LENGTH = 12


@pytest.fixture(scope="module")
def address(server: TritonServer) -> Iterator[str]:
    """The gRPC address of a server that has the entry `ensemble` loaded."""
    with grpcclient.InferenceServerClient(server.grpc_address) as control:
        control.load_model("ensemble")
        yield server.grpc_address
        control.unload_model("ensemble")


@pytest.fixture(scope="module")
def greedy(server: TritonServer) -> str:
    """The text that the same checkpoint generates under vllm_backend's contract."""
    body = {"text_input": PROMPT, "max_tokens": LENGTH, "temperature": 0, "exclude_input_in_output": True}
    status, answer = post(f"http://{server.http_address}/v2/models/demo/generate", body)
    assert status == 200, answer
    return json.loads(answer)["text_output"]


def run_client(address: str, prompt: str = PROMPT, **options: Any) -> list[grpcclient.InferResult]:
    """The client's way: every input has two dimensions, a stream for one request, and stop_stream to await it all."""
    values = {
        "text_input": np.array([[prompt]], dtype=object),
        "max_tokens": np.array([[LENGTH]], dtype=np.int32),
        "stream": np.array([[False]]),
        "beam_width": np.array([[1]], dtype=np.int32),
        "temperature": np.array([[1.0]], dtype=np.float32),
        "exclude_input_in_output": np.array([[False]]),
    }
    for name, value in options.items():
        array = np.array([value if isinstance(value, list) else [value]])
        kinds = {"i": np.int32, "f": np.float32, "b": bool, "U": object}
        values[name] = array.astype(np.uint64 if name in ("seed", "lora_task_id") else kinds[array.dtype.kind])
    inputs = []
    for name, array in values.items():
        inputs.append(grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    wanted = ["text_output"]
    if "return_log_probs" in options:
        wanted += ["cum_log_probs", "output_log_probs"]
    if options.get("num_return_sequences", 1) > 1:
        wanted += ["sequence_index"]
    if "return_num_input_tokens" in options:
        wanted += ["num_input_tokens", "num_output_tokens"]
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer("ensemble", inputs, outputs=list(map(grpcclient.InferRequestedOutput, wanted)))
        client.stop_stream()
    found = [answers.get_nowait() for _ in range(answers.qsize())]
    for answer in found:
        if isinstance(answer, InferenceServerException):
            raise answer
    return found


def texts(results: list[grpcclient.InferResult], count: int = 1) -> list[str]:
    """The text of each sequence, put together as the client does."""
    found = [""] * count
    for result in results:
        index = result.as_numpy("sequence_index")
        found[0 if index is None else index[0][0]] += result.as_numpy("text_output")[0].decode()
    return found


def test_the_prompt_comes_first_and_the_default_is_greedy(address: str, greedy: str) -> None:
    results = run_client(address)
    assert len(results) == 1
    assert texts(results) == [PROMPT + greedy]
    assert texts(run_client(address, exclude_input_in_output=True)) == [greedy]


def test_streaming_ignores_that_the_prompt_is_asked_for(address: str, greedy: str) -> None:
    assert texts(run_client(address, stream=True, exclude_input_in_output=False)) == [greedy]
    assert texts(run_client(address, stream=True, exclude_input_in_output=True)) == [greedy]


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_n_sequences_has_responses_of_its_own(address: str, greedy: str, stream: bool) -> None:
    results = run_client(address, num_return_sequences=2, stream=stream)
    assert {result.as_numpy("sequence_index").shape for result in results} == {(1, 1)}
    assert {result.as_numpy("text_output").shape for result in results} == {(1,)}
    assert texts(results, 2) == [greedy if stream else PROMPT + greedy] * 2
    if not stream:
        assert [int(result.as_numpy("sequence_index")[0][0]) for result in results] == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_the_chosen_tokens(address: str, stream: bool) -> None:
    results = run_client(address, return_log_probs=True, stream=stream, num_return_sequences=2)
    for index in range(2):
        own = [result for result in results if result.as_numpy("sequence_index")[0][0] == index]
        tokens = [result.as_numpy("output_log_probs") for result in own]
        assert all(array.ndim == 3 and array.dtype == np.float32 for array in tokens)
        values = np.concatenate([array[0, 0] for array in tokens])
        assert len(values) == LENGTH
        assert (values <= 0).all()
        total = own[-1].as_numpy("cum_log_probs")
        assert total.shape == (1, 1)
        assert total[0, 0] == pytest.approx(values.sum(), rel=1e-5)


def test_a_seed_is_an_unsigned_number_of_64_bits(address: str) -> None:
    first, again, other = (
        texts(run_client(address, top_p=0.95, seed=seed, num_return_sequences=2), 2)
        for seed in (2**64 - 1, 2**64 - 1, 7)
    )
    assert first == again
    assert first != other
    assert first[0] != first[1], "sampled sequences differ"


def test_stop_and_bad_words_are_lists_with_a_batch_dimension(address: str, greedy: str) -> None:
    words = greedy.split()
    assert texts(run_client(address, stop_words=["nowhere", words[2]], stream=True)) == [greedy.split(words[2])[0]]
    (banned,) = texts(run_client(address, bad_words=[words[0]], stream=True))
    assert not banned.startswith(" " + words[0])


def test_declared_types_and_dims_decide_what_is_sent(address: str, server: TritonServer) -> None:
    (result,) = run_client(address, return_num_input_tokens=True, return_num_output_tokens=True)
    for name, value in (("num_input_tokens", None), ("num_output_tokens", LENGTH)):
        array = result.as_numpy(name)
        assert (array.dtype, array.shape) == (np.int32, (1, 1))
        assert value in (None, array[0, 0])
    body = {"text_input": PROMPT, "max_tokens": LENGTH, "return_num_input_tokens": True, "return_log_probs": True}
    status, answer = post(f"http://{server.http_address}/v2/models/ensemble/generate", body)
    assert status == 200, answer
    assert json.loads(answer)["sequence_index"] == 0
    assert len(json.loads(answer)["output_log_probs"]) == LENGTH


def test_the_generate_endpoint(address: str, server: TritonServer, greedy: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": LENGTH, "bad_words": "", "stop_words": ""}
    url = f"http://{server.http_address}/v2/models/ensemble"
    status, answer = post(f"{url}/generate", body)
    assert (status, json.loads(answer)["text_output"]) == (200, PROMPT + greedy)
    status, answer = post(f"{url}/generate_stream", {**body, "stream": True, "num_return_sequences": 2})
    assert status == 200, answer
    events = server_sent_events(answer)
    for index in range(2):
        assert "".join(e["text_output"] for e in events if e["sequence_index"] == index) == greedy


def test_ids_in_and_ids_out(address: str, greedy: str) -> None:
    """As clients of the model `tensorrt_llm` do, under the names of the wire contract."""
    tokenizer = demo_tokenizer()
    with GrpcStream(address, "ensemble") as stream:
        values = {"max_tokens": np.array([[LENGTH]], dtype=np.int32), "stream": np.array([[True]])}
        values["input_ids"] = np.array(tokenizer.encode(PROMPT), dtype=np.int64)
        values["return_token_ids"] = np.array([True])
        inputs = []
        for name, array in values.items():
            inputs.append(grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        stream.answers["ids"] = Responses()
        stream.client.async_stream_infer("ensemble", inputs, request_id="ids", enable_empty_final_response=True)
        stream.wait("ids")
        assert stream.answers["ids"].error is None
        assert tokenizer.decode(tokenizer.encode(PROMPT) + stream.answers["ids"].token_ids) == PROMPT + greedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 2}, "beam_width=2 is not supported: omit it or set it to 1"),
        ({"return_context_logits": True}, "return_context_logits=True is not supported"),
        ({"lora_task_id": 5}, "LoRA feature is not enabled"),
    ],
)
def test_unsupported_options_are_refused_by_name(address: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InferenceServerException, match=message):
        run_client(address, **options)


def test_a_batch_of_prompts_is_refused(address: str) -> None:
    text = grpcclient.InferInput("text_input", [2, 1], "BYTES")
    text.set_data_from_numpy(np.array([[PROMPT], [PROMPT]], dtype=object))
    errors: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: errors.put(error))
        client.async_stream_infer("ensemble", [text])
        assert "unexpected shape for input 'text_input'" in errors.get(timeout=30).message()


def test_a_request_goes_on_from_the_output_of_each_sequence(server: TritonServer, address: str) -> None:
    """One is in the middle, one is complete and yields only its end, and one has ended elsewhere."""
    url = f"http://{server.http_address}/v2/models/ensemble/generate_stream"
    body = {"text_input": PROMPT, "max_tokens": LENGTH, "num_return_sequences": 3, "top_p": 0.9, "seed": 3}
    body |= {"stream": True, "return_token_ids": True, "return_finish_reason": True, "ignore_eos": True}

    def outputs(**resume: Any) -> dict[int, tuple[list[int], list[str]]]:
        status, answer = post(url, {**body, **resume})
        assert status == 200, answer
        found: dict[int, tuple[list[int], list[str]]] = {}
        for event in server_sent_events(answer):
            ids, ends = found.setdefault(event["sequence_index"], ([], []))
            tokens = event.get("token_ids", [])
            ids += tokens if isinstance(tokens, list) else [tokens]
            if event["finish_reason"] != "None":
                ends.append(event["finish_reason"])
        return found

    whole = outputs()
    given = whole[0][0][:5] + whole[1][0]
    rest = outputs(resume_token_ids=given, resume_token_counts=[5, LENGTH, -1])
    assert rest == {0: (whole[0][0][5:], ["length"]), 1: ([], ["length"])}
