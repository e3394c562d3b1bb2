"""The files of a checkpoint that describe its vectors, and the vectors that follow from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import _COMMON, ARCHITECTURES, VOCAB, make_checkpoint
from offline import make_config, make_core
from pooled import expected_vector, pooled, vectors_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from inflight.config import ConfigError
from inflight.engine.pooler_facts import PoolerFacts
from inflight.loading.load_errors import LoadError
from inflight.loading.pooler import load_pooler

CPU = torch.device("cpu")
PROMPT = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(5)).tolist()


def facts_of(path: str, **options: Any) -> PoolerFacts:
    return load_pooler(make_config(path, **options), True, CPU).facts


def write_modules(folder: Path, pooling: dict[str, Any] | None, *others: str, dense: bool = False) -> None:
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        modules.append({"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    if dense:
        (folder / "2_Dense").mkdir()
        config = {"in_features": 32, "out_features": 8, "bias": True}
        config["activation_function"] = "torch.nn.modules.activation.Tanh"
        (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
        weights = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
        save_file(weights, folder / "2_Dense" / "model.safetensors")
        modules.append({"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    modules += [{"idx": 9, "path": f"9_{name}", "type": f"sentence_transformers.models.{name}"} for name in others]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("pooler"))


@pytest.fixture
def copy(plain: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "copy"))


def test_a_chat_model_embeds_by_its_last_token(plain: str) -> None:
    assert facts_of(plain) == PoolerFacts(tasks=["embed", "score"], kind="last", size=32)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_modules_json(copy: Path, pooling: dict[str, Any], kind: str) -> None:
    write_modules(copy, pooling)
    assert (facts_of(str(copy)).kind, facts_of(str(copy)).normalizes) == (kind, False)
    found = facts_of(str(copy), pooler_config={"pooling_type": "CLS", "normalize": True})
    assert (found.kind, found.normalizes) == ("cls", True)


@pytest.mark.parametrize(
    ("pooling", "others", "why"),
    [
        ({"pooling_mode_max_tokens": True}, [], "its pooling is max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, [], "mean_tokens and cls_token"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, [], "leaves out the tokens of the prompt"),
        ({"pooling_mode_mean_tokens": True}, ["LSTM"], "a module of type LSTM"),
    ],
)
def test_what_is_not_supported_leaves_a_model_that_generates(
    copy: Path, pooling: dict[str, Any], others: list[str], why: str
) -> None:
    write_modules(copy, pooling, *others)
    found = facts_of(str(copy))
    assert found.tasks == [] and why in found.lacking and found.generates
    hidden = load_pooler(make_config(str(copy)), False, CPU).facts
    assert "does not show the hidden states" in hidden.lacking


def test_dense_layers_and_cut_embeddings(copy: Path) -> None:
    write_modules(copy, {"pooling_mode_mean_tokens": True}, "Normalize", dense=True)
    assert (facts_of(str(copy)).size, facts_of(str(copy)).normalizes) == (8, True)
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()
    layer = load_file(copy / "2_Dense" / "model.safetensors")
    mean = torch.tensor(expected_vector(model, PROMPT, "mean", normalizes=False))
    expected = torch.tanh(layer["linear.weight"] @ mean + layer["linear.bias"])
    core = make_core(str(copy))
    vectors, _ = vectors_of(
        core,
        [
            pooled(1, PROMPT, "mean"),
            pooled(2, PROMPT, "mean", dimensions=3),
            pooled(3, PROMPT, "mean", activates=False),
        ],
    )
    for found, wanted in (
        (vectors[1], expected / expected.norm()),
        (vectors[2], expected[:3] / expected[:3].norm()),
        (vectors[3], expected),
    ):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-6)


def test_matryoshka_as_vllm_decides_it(copy: Path) -> None:
    assert facts_of(str(copy)).matryoshka is None
    assert facts_of(str(copy), hf_overrides={"is_matryoshka": True}).matryoshka == []
    assert facts_of(str(copy), hf_overrides={"matryoshka_dimensions": [16, 8]}).matryoshka == [8, 16]
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "is_matryoshka": True}))
    assert facts_of(str(copy)).matryoshka == []


def classifier(model_type: str, folder: Path, num_labels: int, **changes: Any) -> tuple[str, Any]:
    values = {**_COMMON, **ARCHITECTURES[model_type], "pad_token_id": 0, "num_labels": num_labels, **changes}
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(model_type, **values), dtype=torch.float32
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(folder)
    return str(folder), model


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"])
@torch.inference_mode()
def test_classifiers_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    labels = {"id2label": {0: "bad", 1: "so so", 2: "good"}, "label2id": {"bad": 0, "so so": 1, "good": 2}}
    path, model = classifier(model_type, tmp_path, 3, **labels)
    core = make_core(path, max_num_batched_tokens=16)
    facts = core.info.pooler  # type: ignore[attr-defined]
    assert facts.tasks == ["embed", "classify"] and facts.labels == ["bad", "so so", "good"] and not facts.generates
    asked = [pooled(1, PROMPT, task="classify"), pooled(2, PROMPT[:7], task="classify", activates=False)]
    vectors, _ = vectors_of(core, asked)
    logits = [model(torch.tensor([prompt])).logits[0] for prompt in (PROMPT, PROMPT[:7])]
    np.testing.assert_allclose(vectors[1], logits[0].softmax(-1).numpy(), rtol=1e-5)
    np.testing.assert_allclose(vectors[2], logits[1].numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("problem", "count", "expected"),
    [
        (None, 1, torch.sigmoid),
        ("multi_label_classification", 3, torch.sigmoid),
        ("regression", 1, lambda logits: logits),
        ("single_label_classification", 3, lambda logits: logits.softmax(-1)),
    ],
)
@torch.inference_mode()
def test_activations_as_pipelines_choose_them(problem: str | None, count: int, expected: Any, tmp_path: Path) -> None:
    path, model = classifier("llama", tmp_path, count, problem_type=problem)
    facts = facts_of(path)
    assert ("score" in facts.tasks) == (count == 1) and facts.pairs == "tokenizer"
    vectors, _ = vectors_of(make_core(path), [pooled(1, PROMPT, task="classify")])
    logits = model(torch.tensor([PROMPT])).logits[0]
    np.testing.assert_allclose(vectors[1], expected(logits).numpy(), rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_a_reranker_whose_answer_is_a_token(copy: Path) -> None:
    """By `LogitScore` of sentence-transformers, or by vLLM's override: the probability of yes beside no."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"no": 11, "yes": 7, "?": 0}, unk_token="?")).save(str(copy / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()
    logits = model(torch.tensor([PROMPT])).logits[0, -1]
    difference = (logits[7] - logits[11]).item()
    override = {"hf_overrides": {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}}
    module = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    for options in (override, {}):
        core = make_core(str(copy), **options)
        facts = core.info.pooler  # type: ignore[attr-defined]
        assert (facts.tasks, facts.pairs, facts.generates) == (["embed", "score"], "template", True)
        assert facts.template[0].startswith("<|im_start|>system") and "{document}" in facts.template[1]
        asked = [pooled(1, PROMPT, task="score"), pooled(2, PROMPT, task="score", activates=False)]
        vectors, _ = vectors_of(core, asked)
        assert vectors[1] == pytest.approx(1 / (1 + np.exp(-difference)), rel=1e-4)
        assert vectors[2] == pytest.approx(difference, rel=1e-4)
        (copy / "1_LogitScore").mkdir(exist_ok=True)
        (copy / "1_LogitScore" / "config.json").write_text('{"true_token_id": 7, "false_token_id": 11}')
        (copy / "modules.json").write_text(json.dumps([{"path": "1_LogitScore", "type": module}]))
    with pytest.raises(LoadError, match=r"classifier_from_token=\['no', 'maybe'\]: not tokens"):
        facts_of(str(copy), hf_overrides={"classifier_from_token": ["no", "maybe"]})


@pytest.mark.parametrize(
    "options",
    [{"pooler_config": {"score_template": "qwen3"}}, {"hf_overrides": {"is_original_qwen3_reranker": True}}],
)
def test_a_template_of_a_model_without_a_score_is_refused(plain: str, options: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match="its scores are cosines of embeddings: set classifier_from_token"):
        facts_of(plain, **options)


def test_a_template_that_leaves_out_a_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the second text must contain \{query\} and \{document\}"):
        make_config("m", pooler_config={"score_template": ["a", "{query}", "b"]})


def test_a_checkpoint_of_the_base_model_embeds_and_does_not_generate(tmp_path: Path) -> None:
    whole = make_checkpoint("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
    bare = tmp_path / "bare"
    model.model.save_pretrained(bare)
    write_modules(bare, {"pooling_mode_lasttoken": True}, "Normalize")
    core = make_core(str(bare))
    facts = core.info.pooler  # type: ignore[attr-defined]
    assert not facts.generates and facts.tasks == ["embed", "score"]
    vectors, _ = vectors_of(core, [pooled(1, PROMPT)])
    np.testing.assert_allclose(vectors[1], expected_vector(model, PROMPT), rtol=1e-5, atol=1e-6)


def test_damaged_files_are_named(copy: Path) -> None:
    (copy / "modules.json").write_text("[{]")
    with pytest.raises(LoadError, match=r"modules\.json cannot be read"):
        facts_of(str(copy))
    (copy / "modules.json").write_text('[{"path": "x"}]')
    with pytest.raises(LoadError, match=r"its pooling cannot be read: KeyError: 'type'"):
        facts_of(str(copy))


def test_prompts_of_sentence_transformers(copy: Path) -> None:
    (copy / "config_sentence_transformers.json").write_text('{"prompts": {"query": "Query: ", "document": ""}}')
    assert facts_of(str(copy)).prompts == {"query": "Query: "}
