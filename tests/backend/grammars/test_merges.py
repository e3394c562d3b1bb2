"""Texts encoded with merges in three arrays: the tokens are those of the library `tokenizers`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from inflight.grammars import guidance
from inflight.grammars.merges import LettersAndMerges, merge_tables
from inflight.grammars.vocabulary import _tables, read_vocabulary

from .conftest import DEMO
from .test_vocabulary import byte_fallback, byte_level


def merged_here(made: Tokenizer) -> LettersAndMerges:
    found = _tables(made.to_str())
    assert found is not None
    return LettersAndMerges(found[0])


def ids(made: Tokenizer, text: str) -> list[int]:
    return made.encode(text, add_special_tokens=False).ids


@st.composite
def bpes(draw: st.DrawFn) -> Tokenizer:
    """Of few letters, so that merges overlap; token ids in any order."""
    tokens, merges = list("abcd "), []
    for _ in range(draw(st.integers(0, 12))):
        pair = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        if "".join(pair) not in tokens:
            tokens.append("".join(pair))
            merges.append(pair)
    vocab = dict(zip(tokens, draw(st.permutations(range(len(tokens))))))
    return Tokenizer(models.BPE(vocab=vocab, merges=draw(st.permutations(merges))))


@given(bpes(), st.lists(st.text("abcdx ", max_size=40), max_size=5))
@settings(max_examples=100, deadline=None)
def test_words_are_merged_as_the_library_merges_them(made: Tokenizer, texts: list[str]) -> None:
    found = merged_here(made)
    for text in ["abcdabcd" * 8, *texts]:
        assert found.encode(text) == ids(made, text)


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_of_the_demo_has_its_tokens(text: str) -> None:
    assert DEMO_HERE.encode(text) == ids(DEMO_MADE, text)


DEMO_MADE = Tokenizer.from_file(str(DEMO))
DEMO_HERE = merged_here(DEMO_MADE)


def test_added_tokens_are_found_within_texts_and_have_their_own_ids() -> None:
    made = byte_level()
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("Q", "the")])
    known = "Ġthe" if made.token_to_id("Ġthe") is not None else max(made.get_vocab(), key=len)
    made.add_tokens([AddedToken("<tool>", lstrip=True, normalized=False), AddedToken(known), AddedToken("Z")])
    made.add_special_tokens([AddedToken("[CONTROL]", special=True, single_word=True)])
    found = merged_here(made)
    texts = " the<tool>the  <tool>", "[CONTROL] x[CONTROL]", "Qick ZZ e\u0301", known, "</s>a</s>", "日本\x00\ud7ff", ""
    for text in texts:
        assert found.encode(text) == ids(made, text), text
    assert made.token_to_id("<tool>") in found.encode("a <tool>")


def test_splits_and_prefixes_are_those_of_the_library() -> None:
    made = byte_level()
    split = pre_tokenizers.Split(" ", "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=True)])
    made.enable_truncation(3)
    found = merged_here(made)
    made.no_truncation()
    for text in ("the quick brown fox", " the  fox\n\n", "ünïcode"):
        assert found.encode(text) == ids(made, text)


def options(**given: Any) -> Tokenizer:
    return Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "<u>": 3}, merges=[("a", "b")], **given))


@pytest.mark.parametrize(
    "made",
    [
        byte_fallback(),
        options(ignore_merges=True),
        options(unk_token="<u>"),
        options(dropout=0.5),
        options(end_of_word_suffix="b"),
        Tokenizer(
            models.BPE(
                vocab={"a": 0, "b": 1, "ab": 2, "ba": 3, "aba": 4},
                merges=[("a", "b"), ("b", "a"), ("ab", "a"), ("a", "ba")],
            )
        ),
    ],
    ids=["byte fallback", "whole words", "unknown letters", "dropout", "a suffix", "a token of two pairs"],
)
def test_what_merges_alone_do_not_say_is_left_to_the_library(made: Tokenizer) -> None:
    assert _tables(made.to_str()) is None


def test_a_file_that_numbers_added_tokens_otherwise_is_left_to_the_library() -> None:
    made = byte_level()
    made.add_tokens(["<one>", "<two>"])
    parts = json.loads(made.to_str())
    assert merge_tables(parts, parts["model"]["merges"]) is not None
    parts["added_tokens"][-1]["id"] += 1
    assert merge_tables(parts, parts["model"]["merges"]) is None


def test_a_merge_of_no_token_is_refused_in_the_words_of_the_library() -> None:
    parts = json.loads(byte_level().to_str())
    parts["model"]["merges"].append(["a", "new"])
    with pytest.raises(Exception) as theirs:
        Tokenizer.from_str(json.dumps(parts))
    with pytest.raises(Exception) as ours:
        read_vocabulary(json.dumps(parts))
    assert str(ours.value) == str(theirs.value)


def test_tries_of_their_own_have_strings_up_to_30_characters() -> None:
    usual = LLTokenizer.general_slices()
    assert [pattern[-6:] for pattern in guidance._slices(usual)] == ["{1,10}", "{1,30}"]
    assert len(usual) == 4  # of another release, see which masks take longer
