"""`LLM.embed`, `score`, `rerank` and `classify` under vLLM's names, from the engine that also generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, make_checkpoint
from pooled import expected_vector
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from inflight import LLM, PoolingParams, SamplingParams


def characters(folder: str) -> None:
    """A tokenizer of single characters."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import Split

    fast = Tokenizer(BPE({chr(i + 33): i for i in range(VOCAB)}, [], unk_token="!"))
    fast.pre_tokenizer = Split("", "isolated")
    fast.save(f"{folder}/tokenizer.json")


def ids(text: str) -> list[int]:
    return [ord(letter) - 33 for letter in text]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("calls"))
    characters(path)
    return path


@pytest.fixture(scope="module")
def llm(checkpoint: str) -> Iterator[LLM]:
    with LLM(checkpoint, device="cpu", kv_cache_memory="8MiB", hf_overrides={"is_matryoshka": True}) as made:
        yield made


@pytest.fixture(scope="module")
def reference(checkpoint: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def test_embed(llm: LLM, reference: Any) -> None:
    outputs = llm.embed(["hello", {"prompt_token_ids": ids("worlds")}, {"prompt": "x"}], use_tqdm=False)
    for output, text in zip(outputs, ("hello", "worlds", "x")):
        np.testing.assert_allclose(
            output.outputs.embedding, expected_vector(reference, ids(text)), rtol=1e-4, atol=1e-6
        )
        assert output.prompt_token_ids == ids(text) and output.outputs.hidden_size == 32 and output.finished
    (cut,) = llm.embed("hello", pooling_params=PoolingParams(dimensions=4, use_activation=False), use_tqdm=False)
    expected = expected_vector(reference, ids("hello"), normalizes=False)[:4]
    np.testing.assert_allclose(cut.outputs.embedding, expected, rtol=1e-4, atol=1e-6)


def test_score_and_rerank(llm: LLM, reference: Any) -> None:
    texts = ["one", "two", "three"]
    query, *others = (expected_vector(reference, ids(text)) for text in ("query", *texts))
    scores = [float(query @ other) for other in others]
    found = [output.outputs.score for output in llm.score("query", texts, use_tqdm=False)]
    assert found == pytest.approx(scores, abs=1e-5)
    ranked = llm.rerank("query", texts, top_n=2, use_tqdm=False)
    best = sorted(range(3), key=lambda i: -scores[i])[:2]
    assert [(result.index, result.document) for result in ranked] == [(i, texts[i]) for i in best]
    with pytest.raises(ValueError, match="2 texts, but 3 to compare with"):
        llm.score(["a", "b"], texts)
    with pytest.raises(ValueError, match="top_n=0"):
        llm.rerank("query", texts, top_n=0)


def test_one_document_or_any_iterable_of_them(llm: LLM) -> None:
    (found,) = llm.rerank("query", "several letters", use_tqdm=False)
    assert (found.index, found.document) == (0, "several letters")
    ranked = llm.rerank("query", (text for text in ["one", "two"]), use_tqdm=False)  # type: ignore[arg-type]
    assert {found.document for found in ranked} == {"one", "two"}


def test_prompts_are_read_as_those_of_generate(llm: LLM) -> None:
    given: list[Any] = [
        np.array([1, 2]),
        {"prompt_token_ids": np.array([3, 4])},
        {"prompt": "x", "prompt_token_ids": [5]},
    ]
    outputs = llm.embed(given, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[1, 2], [3, 4], [5]]
    for bad, says in (
        ([[1.5]], "not a list of token ids"),
        ([[[1]]], "not a list of token ids"),
        ([b"abc"], "not a list of token ids"),
        ([None], "not a list of token ids"),
        ({"text": "a"}, "a prompt in a dict has text"),
    ):
        with pytest.raises(ValueError, match=says):
            llm.embed(bad, use_tqdm=False)  # type: ignore[arg-type]


def test_a_stream_goes_on_beside_embeddings(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    (alone,) = llm.generate("once", params, use_tqdm=False)
    stream = llm.stream("once", params)
    next(stream)
    assert len(llm.embed(["a", "b"], use_tqdm=False)) == 2
    *_, last = stream
    assert last.outputs[0].token_ids == alone.outputs[0].token_ids


def test_refused(llm: LLM) -> None:
    for call, message in [
        (lambda: llm.classify("a"), "task='classify': not a task of this checkpoint: it has embed, score"),
        (lambda: llm.embed(["a", "b" * 300]), r"inputs\[1\]: a text of 300 characters"),
        (lambda: llm.embed("a", pooling_params=PoolingParams(dimensions=64)), "dimensions=64: must be 1 to 32"),
        (lambda: llm.embed([]), "inputs is empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert not llm.engine.has_open
    (cut,) = llm.embed("b" * 300, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(cut.prompt_token_ids) == 256


@torch.inference_mode()
def test_classify(checkpoint: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    labels = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, dtype=torch.float32, pad_token_id=0, **labels
    ).eval()
    model.save_pretrained(tmp_path)
    characters(str(tmp_path))
    for _ in range(2):  # the second time from the weights that the first one has kept
        with LLM(str(tmp_path), device="cpu", kv_cache_memory="8MiB") as llm:
            (output,) = llm.classify("hello", use_tqdm=False)
            with pytest.raises(ValueError, match="no language model head"):
                llm.generate("hello")
        expected = model(torch.tensor([ids("hello")])).logits[0].softmax(-1)
        assert output.outputs.probs == pytest.approx(expected.tolist(), rel=1e-5)
        assert output.label == ["no", "yes"][int(expected.argmax())] and output.outputs.num_classes == 2
