from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from frontend_rig import demo_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from inflight.frontend.text.detokenizer import IncrementalDetokenizer
from inflight.frontend.text.tokenizer import Tokenizer, _Fast

SAMPLE = ["the quick brown fox jumps over the lazy dog, naïvely: 你好 😀 é"] * 3
BYTE_LEVEL = demo_tokenizer()


def sentencepiece_like() -> Tokenizer:
    """Like Llama 2's: "▁" for spaces, bytes spelt <0x..>, the first space dropped when decoding."""
    specials = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = RustTokenizer(models.BPE(unk_token=None, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=300, special_tokens=specials))
    return Tokenizer(_Fast(RustTokenizer.from_str(tokenizer.to_str())))


SPACED = sentencepiece_like()


def chunks_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


texts = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=40)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SPACED], ids=["byte-level", "metaspace"])
@settings(max_examples=150, deadline=None)
@given(prompt=texts, output=texts, cuts=st.lists(st.integers(0, 200), max_size=20))
def test_chunks_joined_are_the_whole_text(tokenizer: Tokenizer, prompt: str, output: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(prompt + output, add_special_tokens=False)
    start = len(tokenizer.encode(prompt, add_special_tokens=False)) % (len(ids) + 1)
    before = tokenizer.decode(ids[:start])
    if before.endswith("\ufffd"):  # the prompt ends inside a character: nothing to compare with
        return
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:start])
    chunks = [detokenizer.push(chunk) for chunk in chunks_of(ids[start:], cuts)]
    assert not any(chunk.endswith("\ufffd") for chunk in chunks)
    assert "".join(chunks) + detokenizer.flush() == tokenizer.decode(ids)[len(before) :]


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(3, BYTE_LEVEL.size - 1), max_size=60), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_chunks_of_random_tokens_are_the_whole_text_too(ids: list[int], cuts: list[int]) -> None:
    """A random model's output is seldom valid UTF-8; only the flush may show an incomplete character."""
    prompt = BYTE_LEVEL.encode("a prompt")
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, prompt)
    text = "".join(detokenizer.push(chunk) for chunk in chunks_of(ids, cuts)) + detokenizer.flush()
    assert text == BYTE_LEVEL.decode(prompt + ids)[len("a prompt") :]


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("skip", [True, False])
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.size - 1), max_size=60), cuts=st.lists(st.integers(1, 40), max_size=20))
def test_random_tokens_pushed_together_give_the_text_of_pushing_each_alone(
    skip: bool, ids: list[int], cuts: list[int]
) -> None:
    """Random tokens are mostly invalid UTF-8, and some are special."""
    together, alone = (IncrementalDetokenizer(BYTE_LEVEL, ids[:2], skip) for _ in range(2))
    for chunk in chunks_of(ids[2:], cuts):
        assert together.push_each(chunk) == "".join([alone.push([token]) for token in chunk])
    assert together.flush() == alone.flush()


@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SPACED])
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 40), max_size=20))
def test_text_pushed_together_is_that_of_each_token_alone(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    together, alone = (IncrementalDetokenizer(tokenizer) for _ in range(2))
    for chunk in chunks_of(tokenizer.encode(text, add_special_tokens=False), cuts):
        assert together.push_each(chunk) == "".join([alone.push([token]) for token in chunk])
    assert together.flush() == alone.flush()


def test_an_incomplete_character_is_held_back_until_the_flush() -> None:
    ids = BYTE_LEVEL.encode("x 😀", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, ids[:1])
    shown = [detokenizer.push([token]) for token in ids[1:-1]]
    assert "".join(shown) == " "
    assert set(detokenizer.flush()) == {"\ufffd"}
    assert detokenizer.flush() == ""


def test_a_leading_space_survives_a_decoder_that_strips_it() -> None:
    ids = SPACED.encode("the quick", add_special_tokens=False)
    prompt = SPACED.encode("the", add_special_tokens=False)
    assert IncrementalDetokenizer(SPACED, prompt).push(ids[len(prompt) :]) == " quick"
    quick = ids[len(prompt)]
    assert SPACED.token_text(quick).startswith(" ")


def test_special_tokens_are_skipped_or_shown() -> None:
    prompt = BYTE_LEVEL.encode("a")
    ids = [*BYTE_LEVEL.encode(" b", add_special_tokens=False), 2]
    assert IncrementalDetokenizer(BYTE_LEVEL, prompt).push(ids) == " b"
    assert IncrementalDetokenizer(BYTE_LEVEL, prompt, skip_special_tokens=False).push(ids) == " b<|im_end|>"


def test_a_long_run_of_skipped_tokens_takes_no_memory() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, BYTE_LEVEL.encode("a"))
    for _ in range(100):
        assert detokenizer.push([2]) == ""
    assert len(detokenizer._pending) < 20
    assert detokenizer.push(BYTE_LEVEL.encode(" b", add_special_tokens=False)) == " b"


def test_a_slow_tokenizer_is_loaded_by_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    tokenizer = Tokenizer.load(str(tmp_path))
    ids = tokenizer.encode("a é你", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:1])
    assert "".join(detokenizer.push([token]) for token in ids[1:]) + detokenizer.flush() == " é你"


def test_a_byte_level_decoder_is_not_asked_again_about_whole_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = BYTE_LEVEL.encode("the quick brown 😀 fox", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, ids[:1])
    calls = 0

    def counted(ids: list[int], skip_special_tokens: bool) -> str:
        nonlocal calls
        calls += 1
        return BYTE_LEVEL.decode_ids(ids, skip_special_tokens)

    monkeypatch.setattr(detokenizer, "_decode", counted)
    pieces = [token for token in ids[1:] if not BYTE_LEVEL.whole_texts[token]]
    text = "".join([detokenizer.push([token]) for token in ids[1:]])
    assert text == " quick brown 😀 fox"
    assert pieces and calls <= 8 * len(pieces)
    calls = 0
    assert detokenizer.push_each(ids[:1] * 5) == "the" * 5 and calls == 0
    assert BYTE_LEVEL.concatenates and not SPACED.concatenates
