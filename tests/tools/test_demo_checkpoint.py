"""The embedded demo model: small, loadable offline, trained, and reproducible with its script."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight.model_json import read_model_json

DEMO = Path(__file__).parents[2] / "model_repository" / "demo"
CHECKPOINT = DEMO / "1" / "checkpoint"
MAX_BYTES = 8_000_000
PROMPTS = ("Return a string containing", "This module provides", "Create a new", "The following", "Called when the")
WORD = re.compile(r"[a-z]+")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    name = "demo_make_checkpoint"
    spec = importlib.util.spec_from_file_location(name, DEMO / "make_checkpoint.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while the class is created
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, local_files_only=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def documents(script: ModuleType) -> list[Any]:
    """The docstrings of the standard library, which takes seconds to read."""
    return script.stdlib_documents()


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Pairs of adjacent words in `text`, in lower case."""
    return list(itertools.pairwise(WORD.findall(text.lower())))


def greedy_pairs(model: Any, tokenizer: Any) -> set[tuple[str, str]]:
    """Distinct pairs of words in greedy continuations of `PROMPTS`, without partial words at the ends."""
    pairs = set()
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**ids, max_new_tokens=48, min_new_tokens=24, do_sample=False)[0]
        text = tokenizer.decode(output[ids["input_ids"].shape[1] :], skip_special_tokens=True)
        pairs.update(pairs_of(text)[1:-1])
    return pairs


def test_the_checkpoint_stays_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*") if path.is_file()) <= MAX_BYTES


def test_model_json_is_an_engine_config_with_its_checkpoint_beside_it() -> None:
    config = read_model_json(DEMO / "1" / "model.json")
    assert Path(config.model) == CHECKPOINT.resolve()
    assert config.step_tokens >= config.max_num_seqs


def test_checkpoint_is_a_grouped_query_llama_with_tied_embeddings(model: Any) -> None:
    config = model.config
    assert config.model_type == "llama"
    assert config.tie_word_embeddings
    assert config.num_key_value_heads < config.num_attention_heads
    stored = AutoModelForCausalLM.from_pretrained(CHECKPOINT, local_files_only=True, dtype="auto")
    assert stored.dtype == torch.bfloat16


def test_tokenizer_round_trips_text(tokenizer: Any) -> None:
    for text in [
        "Return the value.",
        "  leading and trailing  ",
        "def f(x):\n\treturn x  # tab\r\n",
        "naïve café: 東京, Ελλάδα, שלום",
        "👩‍🚀🏳️‍🌈 and e\u0301 and \x00",
    ]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_special_tokens(tokenizer: Any, model: Any) -> None:
    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, turn_end]


def test_chat_template_asks_for_the_assistant(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "What is json.dumps?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|endoftext|><|im_start|>user\nWhat is json.dumps?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.nightly
def test_greedy_output_reads_as_words(model: Any, tokenizer: Any, documents: list[Any]) -> None:
    known_pairs = {pair for document in documents for pair in pairs_of(document.text)}
    known_words = {word for pair in known_pairs for word in pair}
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(model.config).eval()
    pairs, noise = greedy_pairs(model, tokenizer), greedy_pairs(untrained, tokenizer)
    assert sum(word in known_words for pair in pairs for word in pair) > 0.95 * 2 * len(pairs)
    # Random tokens often form words too, but plausible pairs of words must be learnt.
    assert len(pairs & known_pairs) > max(50, 0.8 * len(pairs))
    assert len(noise & known_pairs) < 15


@pytest.mark.nightly
@torch.inference_mode()
def test_model_predicts_documentation_at_every_position(
    model: Any, tokenizer: Any, documents: list[Any], script: ModuleType
) -> None:
    text = "\n\n".join(document.text for document in documents[::7])
    ids = torch.tensor([tokenizer.encode(text, verbose=False)[: model.config.max_position_embeddings]])
    logits = model(input_ids=ids).logits[0, :-1]
    nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert ids.shape[1] == model.config.max_position_embeddings
    # Uniform guessing costs ln(2560) = 7.8 nats per token.
    for quarter in nll.chunk(4):
        assert quarter.mean() < 4


def test_texts_are_gathered_in_order_once_and_clean(script: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "pack"
    (package / "test").mkdir(parents=True)
    source = '"""Module text, long enough."""\nclass A:\n    """Class text,\n      indented more."""\n'
    (package / "__init__.py").write_text(source + '    def f(self):\n        """Module text, long enough."""\n')
    (package / "test" / "skipped.py").write_text('"""Never gathered: a test."""\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "a.py").write_text('def g():\n    def inner():\n        """An inner function."""\n    """short"""\n')
    found = [(document.name, document.text) for document in script.stdlib_documents(tmp_path)]
    assert found == [
        ("a.g.inner", "An inner function."),
        ("pack", "Module text, long enough."),
        ("pack.A", "Class text,\nindented more."),
    ]


@pytest.mark.nightly
def test_split_does_not_depend_on_order(script: ModuleType, documents: list[Any]) -> None:
    train, held_out = script.split(documents)
    assert set(train).isdisjoint(held_out) and set(train) | set(held_out) == set(documents)
    assert set(script.split(documents[::-1])[1]) == set(held_out)
    assert 0.01 < len(held_out) / len(documents) < 0.04


@pytest.mark.nightly
def test_same_seed_same_checkpoint(script: ModuleType, documents: list[Any], tmp_path: Path) -> None:
    recipe = script.Recipe(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        max_position_embeddings=128,
        steps=4,
        tokens_per_step=128,
        length=32,
        long_length=128,
        long_every=2,
    )
    for folder, seed in (("first", 1), ("again", 1), ("other", 2)):
        measured = script.make(replace(recipe, seed=seed), tmp_path / folder, documents[:200])
        assert measured["perplexity"] > 1 and measured["bits_per_byte"] > 0
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("first", "other")]
    assert weights[0] != weights[1]
