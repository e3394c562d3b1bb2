"""`LLM` and `AsyncLLM` with encoders: all-MiniLM's layout, a cross-encoder, tokenizers like BERT's and XLM-R's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_checkpoints import alone, logits_alone, make_encoder, mini_lm_layout, sentence_pieces, word_pieces
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from inflight import LLM, AsyncLLM, PoolingParams

SENTENCES = ["How large is a cat?", "A Cat weighs 4 kg.", "it", "rain " * 9]


@pytest.fixture(scope="module")
def mini_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mini_lm")
    path = make_encoder("bert", folder)
    word_pieces(path)
    mini_lm_layout(folder)
    return path


@pytest.fixture(scope="module")
def llm(mini_lm: str) -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM(mini_lm, device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = make_encoder("bert", tmp_path_factory.mktemp("cross"), labels=["match"])
    word_pieces(path)
    return path


def model_of(path: str, kind: Any = AutoModel) -> Any:
    return kind.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def test_embeddings_of_mini_lm(llm: LLM, mini_lm: str) -> None:
    model, tokenizer = model_of(mini_lm), AutoTokenizer.from_pretrained(mini_lm)
    outputs = llm.embed(SENTENCES, use_tqdm=False)
    for output, text in zip(outputs, SENTENCES):
        assert output.prompt_token_ids == tokenizer(text)["input_ids"]
        np.testing.assert_allclose(
            output.outputs.embedding, alone(model, output.prompt_token_ids), rtol=1e-5, atol=1e-6
        )
    (score,) = llm.score(SENTENCES[0], SENTENCES[1], use_tqdm=False)
    one, other = (np.array(output.outputs.embedding) for output in outputs[:2])
    assert score.outputs.score == pytest.approx(float(one @ other), abs=1e-6)
    (instructed,) = llm.embed("x", instruction="query", use_tqdm=False)
    assert instructed.prompt_token_ids == tokenizer("q x")["input_ids"]


def test_what_an_encoder_refuses(llm: LLM) -> None:
    for call, message in [
        (lambda: llm.generate("hello"), "no language model head, so it generates no text"),
        (lambda: llm.chat([{"role": "user", "content": "hello"}]), "chat template|no text"),
        (lambda: llm.classify("hello"), "not a task of this checkpoint: it has embed, score"),
        (lambda: llm.embed(["fine", "rain " * 40]), r"inputs\[1\]: a prompt of 162 tokens: it must be 1 to 60 long"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert not llm.engine.has_open


def test_truncation_keeps_the_special_tokens(llm: LLM) -> None:
    params = [
        PoolingParams(truncate_prompt_tokens=most, truncation_side=side) for most, side in ((6, "right"), (6, "left"))
    ]
    right, left = llm.embed(["abcdefghij"] * 2, pooling_params=params, use_tqdm=False)
    whole = llm.tokenizer.encode("abcdefghij")
    assert right.prompt_token_ids == [2, *whole[1:5], 3]
    assert left.prompt_token_ids == [2, *whole[-5:-1], 3]
    (most,) = llm.embed("rain " * 40, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(most.prompt_token_ids) == 60 and most.prompt_token_ids[-1] == 3


class TestPoolingParams:
    def test_one_for_each_prompt(self, llm: LLM) -> None:
        raw, unit = llm.embed(["cat", "cat"], pooling_params=[PoolingParams(use_activation=False), PoolingParams()])
        long, short = (np.linalg.norm(output.outputs.embedding) for output in (raw, unit))
        assert short == pytest.approx(1.0) and long != pytest.approx(1.0, abs=1e-3)

    def test_errors_name_the_input(self, llm: LLM) -> None:
        some = [PoolingParams(), PoolingParams()]
        for prompts, params, message in [
            (["a", "b", "c"], some, "3 prompts, but 2 pooling_params"),
            (["a", "rain " * 40], some, r"inputs\[1\]: a prompt of 162 tokens"),
            (["a", "b"], [PoolingParams(), None], "pooling_params of type NoneType: give inflight.PoolingParams"),
            ("a", {"dimensions": 3}, "pooling_params of type dict"),
            ([], [], "inputs is empty"),
        ]:
            with pytest.raises(ValueError, match=message):
                llm.embed(prompts, pooling_params=params, use_tqdm=False)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(truncate_prompt_tokens=1.5), "truncate_prompt_tokens=1.5 of type float: must be an integer or None"),
            (dict(dimensions=True), "dimensions=True of type bool: must be an integer or None"),
            (dict(use_activation=1), "use_activation=1 of type int: must be True, False or None"),
            (dict(truncation_side="up"), 'truncation_side="?\'?up\'?"?: must be "left" or "right"'),
        ],
    )
    def test_values_are_checked_when_they_are_made(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            PoolingParams(**options)
        assert PoolingParams(dimensions=np.int64(3)).dimensions == 3  # type: ignore[arg-type]


def test_a_cross_encoder(cross_encoder: str, tmp_path: Path) -> None:
    """The tokenizer's template of pairs, with its types; sigmoid of the one logit, as sentence-transformers has it."""
    model, tokenizer = (
        model_of(cross_encoder, AutoModelForSequenceClassification),
        AutoTokenizer.from_pretrained(cross_encoder),
    )
    query, documents = "How large?", ["A cat", "It rains and rains", "no"]
    logits = []
    for document in documents:
        found = tokenizer(query, document)
        start = found["token_type_ids"].index(1)
        logits.append(float(logits_alone(model, found["input_ids"], start)[0]))
    with LLM(cross_encoder, device="cpu") as llm:
        scores = [output.outputs.score for output in llm.score(query, documents, use_tqdm=False)]
        assert scores == pytest.approx(torch.tensor(logits).sigmoid().tolist(), rel=1e-5)
        raw = llm.score(query, documents, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        assert [output.outputs.score for output in raw] == pytest.approx(logits, rel=1e-4)
        ranked = llm.rerank(query, documents, top_n=2, use_tqdm=False)
        assert [result.index for result in ranked] == sorted(range(3), key=lambda i: -logits[i])[:2]
        cut = PoolingParams(truncate_prompt_tokens=14)
        (short,) = llm.score(query, documents[1], pooling_params=cut, use_tqdm=False)
        whole = tokenizer(query, documents[1])["input_ids"]
        assert short.prompt_token_ids == [*whole[:13], 3], "the document's end is cut"
        with pytest.raises(ValueError, match="task='embed': not a task of this checkpoint: it has score, classify"):
            llm.embed("a")


def test_the_activation_that_a_cross_encoder_names(tmp_path: Path) -> None:
    """As cross-encoder/ms-marco-MiniLM-L6-v2, whose scores are logits."""
    path = make_encoder(
        "bert", tmp_path, labels=["match"], sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"}
    )
    word_pieces(path)
    with LLM(path, device="cpu") as llm:
        (one,) = llm.score("a", "b", use_tqdm=False)
        (raw,) = llm.score("a", "b", pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert one.outputs.score == raw.outputs.score


def test_sentence_pieces_of_xlm_roberta(tmp_path: Path) -> None:
    """bge-reranker's layout: <s> query </s></s> document </s>, without types."""
    path = make_encoder("xlm-roberta", tmp_path, labels=["match"])
    sentence_pieces(path)
    model, tokenizer = model_of(path, AutoModelForSequenceClassification), AutoTokenizer.from_pretrained(path)
    with LLM(path, device="cpu") as llm:
        (output,) = llm.score("cat", "rain", use_tqdm=False)
    ids = tokenizer("cat", "rain")["input_ids"]
    assert output.prompt_token_ids == ids and ids.count(2) == 3
    assert output.outputs.score == pytest.approx(1 / (1 + np.exp(-logits_alone(model, ids)[0])), rel=1e-5)


@pytest.fixture(scope="module")
def made(mini_lm: str) -> Iterator[AsyncLLM]:
    made = AsyncLLM(mini_lm, device="cpu")
    yield made
    made.close()


class TestAsyncLLM:
    def test_vectors_of_many_tasks(self, made: AsyncLLM, llm: LLM) -> None:
        async def run() -> list[Any]:
            return await asyncio.gather(
                *(made.embed(text) for text in SENTENCES),
                made.score("a", ["b", "c"]),
                made.rerank("a", SENTENCES, top_n=1),
            )

        *embedded, scored, ranked = asyncio.run(run())
        for (output,), (right) in zip(embedded, llm.embed(SENTENCES, use_tqdm=False)):
            assert output.outputs == right.outputs
        expected = llm.score("a", ["b", "c"], use_tqdm=False)
        assert [output.outputs for output in scored] == [output.outputs for output in expected]
        assert ranked == llm.rerank("a", SENTENCES, top_n=1, use_tqdm=False)

    def test_errors(self, made: AsyncLLM) -> None:
        with pytest.raises(ValueError, match="not a task of this checkpoint"):
            asyncio.run(made.classify("a"))
        with pytest.raises(ValueError, match=r"inputs\[1\]"):
            asyncio.run(made.embed(["a", "rain " * 40]))
        assert not made.engine.has_open

    def test_cancelling_aborts(self, made: AsyncLLM) -> None:
        async def run() -> None:
            task = asyncio.ensure_future(made.embed(["cat"] * 500))
            while not made.engine.has_open:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(await made.embed("cat")) == 1

        asyncio.run(run())
        assert not made.engine.has_open
