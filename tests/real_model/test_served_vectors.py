"""Vectors of the real model beside its chats, through a real tritonserver, against transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from model_entries import killed_at_the_end, write_entry
from processes_of import engine_process
from transformers_answers import Answers
from wire import GrpcStream

from inflight_tools.installation import LauncherError, TritonInstallation
from inflight_tools.launcher import TritonServer

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
TEXTS = ["Where is Paris?", "It rains in spring. " * 30, "Paris is the capital of France.", "日本"]
CHAT = {"text_input": "The capital of France is", "sampling_parameters": {"temperature": 0, "max_tokens": 24}}
MANY = 2048  # inputs of one request


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    try:
        TritonInstallation.find()
    except LauncherError as error:
        pytest.skip(str(error))
    repository = tmp_path_factory.mktemp("models")
    options = {"kv_cache_memory": "256MiB", "max_model_len": 1024, "max_num_seqs": 8, "max_queue_size": 3000}
    for name, more in (("fcfs", {}), ("tenants", {"tenants": {"*": {}}})):
        write_entry(repository, name, model=str(smollm2), **options, **more)
    with killed_at_the_end(TritonServer(repository)) as server:
        yield server


@torch.inference_mode()
def expected(answers: Answers, texts: list[str]) -> np.ndarray:
    """Hidden states of the last tokens, of length 1."""
    rows = [answers.model.model(torch.tensor([answers.tokenizer(text)["input_ids"]]))[0][0, -1] for text in texts]
    return torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()


@pytest.mark.parametrize("dies", [False, True], ids=["in peace", "with a killed engine"])
def test_vectors_are_transformers_and_chats_stay_the_same(served: TritonServer, answers: Answers, dies: bool) -> None:
    prompt = answers.tokenizer(CHAT["text_input"])["input_ids"]
    text = answers.tokenizer.decode(answers.tokens(prompt, 24), skip_special_tokens=True)
    with GrpcStream(served.grpc_address, "fcfs") as stream:
        stream.send("chat", stream=True, **CHAT)
        stream.wait_chunks("chat", 2)
        stream.send("vectors", pooling={"task": "embed", "inputs": TEXTS * 4})
        if dies:
            engine = engine_process(served, "fcfs")
            engine.suspend()
            stream.send("more", pooling={"task": "embed", "inputs": TEXTS})
            engine.kill()
            stream.wait("more", timeout=300)
            np.testing.assert_allclose(
                stream.answers["more"].chunks[0]["pooled"], expected(answers, TEXTS), rtol=1e-4, atol=1e-6
            )
        stream.wait("chat", "vectors", timeout=300)
    found = stream.answers["vectors"].chunks[0]["pooled"]
    np.testing.assert_allclose(found, np.tile(expected(answers, TEXTS), (4, 1)), rtol=1e-4, atol=1e-6)
    assert stream.answers["chat"].text.removeprefix(CHAT["text_input"]) == text


@pytest.mark.parametrize("model", ["fcfs", "tenants"])
def test_a_chat_behind_many_inputs_ends_long_before_them(served: TritonServer, answers: Answers, model: str) -> None:
    with GrpcStream(served.grpc_address, model) as stream:
        stream.send("alone", **CHAT)
        stream.wait("alone", timeout=300)
        engine = engine_process(served, model)
        engine.suspend()
        own, other = ({}, {}) if model == "fcfs" else ({"tenant": "a list"}, {"tenant": "a chat"})
        stream.send("many", pooling={"task": "embed", "inputs": [[504, 3575 + i % 7] for i in range(MANY)]}, **own)
        stream.send("chat", **CHAT, **other)
        engine.resume()
        stream.wait("chat", timeout=600)
        assert not stream.answers["many"].finals
        stream.wait("many", timeout=600)
    assert stream.answers["chat"].text == stream.answers["alone"].text
    vectors = stream.answers["many"].chunks[0]["pooled"]
    assert vectors.shape == (MANY, 576) and (vectors[7:14] == vectors[:7]).all()
