"""Vectors through a real tritonserver, from the model that also chats, and from encoders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import typer
from checkpoints import VOCAB, make_checkpoint
from encoder_checkpoints import alone, logits_alone, make_encoder, mini_lm_layout, word_pieces
from model_entries import keep_weights, loaded
from processes_of import engine_process
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner
from wire import GrpcStream, gauges, post

from inflight_client.vectors_cli import rerank
from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.gateway_process import GatewayProcess
from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports


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
def serving(triton: TritonServer, keeping: dict[str, str], checkpoint: str) -> Iterator[TritonServer]:
    keep_weights(keeping["INFLIGHT_CACHE"], model=checkpoint)
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


QUERY, DOCUMENTS = "How large is a cat?", ["A cat weighs 4 kg.", "It rains.", "no"]


@pytest.fixture(scope="module")
def cross(triton: TritonServer, keeping: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The folder of a cross-encoder that the server has as "cross"."""
    path = make_encoder("bert", tmp_path_factory.mktemp("cross"), labels=["match"])
    word_pieces(path)
    keep_weights(keeping["INFLIGHT_CACHE"], model=path)
    with loaded(triton, cross={"model": path, "max_num_seqs": 8}):
        yield path


@pytest.fixture(scope="module")
def logits(cross: str) -> np.ndarray:
    """Those of transformers for QUERY and each of DOCUMENTS."""
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(cross, **options).eval(), tokenizer_of(cross)
    pairs = [tokenizer(QUERY, document) for document in DOCUMENTS]
    return np.array([logits_alone(model, one["input_ids"], one["token_type_ids"].index(1))[0] for one in pairs])


def tokenizer_of(path: str) -> Any:
    return AutoTokenizer.from_pretrained(path)


def test_a_cross_encoder_through_triton(triton: TritonServer, cross: str, logits: np.ndarray) -> None:
    """Its pairs keep their types when the engine process is replaced."""
    with GrpcStream(triton.grpc_address, "cross") as stream:
        stream.send("text", text_input="hello")
        stream.wait("text")
        process = engine_process(triton, "cross")
        process.suspend()
        stream.send("replayed", pooling={"task": "score", "inputs": [[QUERY, document] for document in DOCUMENTS]})
        process.kill()
        stream.send("labels", pooling={"task": "classify", "inputs": ["a"]})
        stream.wait("replayed", "labels")
    assert "no language model head, so it generates no text" in str(stream.answers["text"].error)
    (found,) = stream.answers["replayed"].chunks
    np.testing.assert_allclose(found["pooled"][:, 0], 1 / (1 + np.exp(-logits)), rtol=1e-5)
    assert stream.answers["labels"].chunks[0]["labels"].tolist() == [b"match"]


@pytest.mark.nightly
def test_encoders_through_the_gateway_and_on_the_command_line(
    triton: TritonServer, cross: str, logits: np.ndarray, tmp_path: Path
) -> None:
    """Embeddings in all-MiniLM's layout, and scores, rankings and classes of the cross-encoder."""
    path = make_encoder("bert", tmp_path)
    word_pieces(path)
    mini_lm_layout(tmp_path)
    model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    expected = np.stack([alone(model, tokenizer_of(path)(text)["input_ids"]) for text in DOCUMENTS])
    order = np.argsort(-logits).tolist()
    (port,) = pick_ports(1)
    gateway = GatewayProcess(GatewayOptions(), ServerOptions(port=port, exit_timeout=2))
    with loaded(triton, mini_lm={"model": path, "max_num_seqs": 8}):
        gateway.start(triton.grpc_address)
        try:

            def answer(path: str, **body: Any) -> Any:
                response = httpx.post(gateway.url.removesuffix("/v1") + path, json=body, timeout=60)
                assert response.status_code == 200, response.text
                return response.json()

            found = answer("/v1/embeddings", model="mini_lm", input=DOCUMENTS)
            vectors = [one["embedding"] for one in found["data"]]
            np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6)
            scores = answer("/score", model="cross", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)
            assert [one["score"] for one in scores["data"]] == pytest.approx(logits.tolist(), rel=1e-4)
            ranked = answer("/v1/rerank", model="cross", query=QUERY, documents=DOCUMENTS)
            assert [one["index"] for one in ranked["results"]] == order
            assert answer("/classify", model="cross", input="a")["data"][0]["label"] == "match"
        finally:
            gateway.stop()
        with GrpcStream(triton.grpc_address, "mini_lm") as stream:
            stream.send("vllm's", embedding_request={"input": DOCUMENTS[0]})
            stream.wait("vllm's")
        (as_text,) = stream.answers["vllm's"].chunks
        np.testing.assert_allclose(json.loads(as_text["text_output"][0]), expected[0], rtol=1e-5, atol=1e-6)
        app = typer.Typer()
        app.command()(rerank)
        arguments = [QUERY, *DOCUMENTS, "--model", "cross", "--url", triton.grpc_address, "--json"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert [json.loads(line)["index"] for line in result.output.splitlines()] == order
