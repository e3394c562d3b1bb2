"""Vectors through a real tritonserver, from the model that also chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, make_checkpoint
from model_entries import loaded
from processes_of import engine_process
from transformers import AutoModelForCausalLM
from wire import GrpcStream, gauges, post

from inflight_tools.launcher import TritonServer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random llama whose tokens are characters."""
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import Split

    path = make_checkpoint("llama", tmp_path_factory.mktemp("pooling"))
    fast = Fast(BPE({chr(i + 33): i for i in range(VOCAB)}, [], unk_token="!"))
    fast.pre_tokenizer = Split("", "isolated")
    fast.save(f"{path}/tokenizer.json")
    return path


@pytest.fixture(scope="module")
def serving(triton: TritonServer, checkpoint: str) -> Iterator[TritonServer]:
    options = {"model": checkpoint, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_queue_size": 50}
    with loaded(triton, pooled=options) as server:
        yield server


@pytest.fixture(scope="module")
def reference(checkpoint: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@torch.inference_mode()
def embedding(model: Any, text: str) -> np.ndarray:
    ids = torch.tensor([[ord(letter) - 33 for letter in text]])
    return torch.nn.functional.normalize(model.model(ids)[0][0, -1], dim=0).numpy()


def test_embeddings_scores_and_chats_share_an_engine(serving: TritonServer, reference: Any) -> None:
    texts = ["hello", "w" * 100, "abc" * 30, "?"]
    chat = {"text_input": "once", "sampling_parameters": {"max_tokens": 40, "temperature": 0}}
    with GrpcStream(serving.grpc_address, "pooled") as stream:
        stream.send("alone", **chat)
        stream.wait("alone")
        stream.send("beside", **chat)
        stream.send("vectors", pooling={"task": "embed", "inputs": [*texts, [3, 4, 5]]})
        stream.send("scores", pooling={"task": "score", "inputs": [["hello", text] for text in texts]})
        stream.send("vllm's", embedding_request={"input": "hello"}, return_num_input_tokens=True)
        stream.wait("beside", "vectors", "scores", "vllm's")
        answers = stream.answers
    assert answers["beside"].text == answers["alone"].text
    (found,) = answers["vectors"].chunks
    expected = np.stack([embedding(reference, text) for text in [*texts, "$%&"]])
    np.testing.assert_allclose(found["pooled"], expected, rtol=1e-4, atol=1e-6)
    assert found["pooled"].shape == (5, 32) and found["pooled"].dtype == np.float32
    assert found["pooled_token_counts"].tolist() == [5, 100, 90, 1, 3]
    (scores,) = answers["scores"].chunks
    np.testing.assert_allclose(scores["pooled"][:, 0], expected[:4] @ expected[0], rtol=1e-4, atol=1e-6)
    (as_text,) = answers["vllm's"].chunks
    np.testing.assert_allclose(json.loads(as_text["text_output"][0]), expected[0], rtol=1e-4, atol=1e-6)
    assert as_text["num_input_tokens"].tolist() == [5]


def test_one_bad_input_fails_its_request_alone(serving: TritonServer) -> None:
    with GrpcStream(serving.grpc_address, "pooled") as stream:
        stream.send("bad", pooling={"task": "embed", "inputs": ["fine", "x" * 300]})
        stream.wait("bad")
        stream.send("good", pooling={"task": "embed", "inputs": ["fine", "y"]})
        stream.wait("good")
    assert "inputs[1]: a text of 300 characters" in str(stream.answers["bad"].error)
    assert stream.answers["good"].chunks[0]["pooled"].shape == (2, 32)
    body = {"pooling": json.dumps({"task": "classify", "inputs": ["a"]})}
    status, text = post(f"http://{serving.http_address}/v2/models/pooled/generate", body)
    assert status == 400 and "not a task of this checkpoint: it has embed, score" in text


def test_an_engine_that_dies_starts_anew_with_them(serving: TritonServer, reference: Any) -> None:
    before = gauges(serving.metrics_address, "pooled")
    with GrpcStream(serving.grpc_address, "pooled") as stream:
        process = engine_process(serving, "pooled")
        process.suspend()
        stream.send("replayed", pooling={"task": "embed", "inputs": ["hello", "z" * 200]})
        process.kill()
        stream.wait("replayed")
    found = stream.answers["replayed"].chunks[0]["pooled"]
    np.testing.assert_allclose(found[0], embedding(reference, "hello"), rtol=1e-4, atol=1e-6)
    after = gauges(serving.metrics_address, "pooled")
    counted = {name: after[name] - before[name] for name in after}
    assert counted["inflight_pooled_total"] == 2
    assert counted["vllm:prompt_tokens_total"] == 205 and counted["vllm:generation_tokens_total"] == 0
