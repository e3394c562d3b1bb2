"""Tokenizers in GGUF files: tokens as llama.cpp and the models' own tokenizers have them, or a way out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from inflight.gguf.header import GgufError
from inflight.gguf.tokenizer import make_tokenizer, special_tokens, stop_token_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = ["▁", "a", "b", "c", "▁a", "ab", "bc", "▁ab", "abc", "▁▁", "▁▁▁", "ca", "▁abca", "é", "<tool>", "▁b", "cc"]
# Scores that are no order of lengths: "bc" is merged before "ab".
SCORES = [-50, -51, -52, -53, -3, -8, -2, -4, -1, -6, -7, -9, -10, -54, 0, -5, -11]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS)]
    types[3 + 256 + WORDS.index("<tool>")] = USER_DEFINED
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *octets, *WORDS],
        "tokenizer.ggml.scores": np.array([0.0] * 259 + SCORES, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def merged(text: str) -> list[str]:
    """llama.cpp's algorithm: of all neighbours that are a piece together, the ones with the highest score, leftmost."""
    scores = dict(zip(WORDS, SCORES))
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        found = [
            (scores[left + right], -place)
            for place, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in scores
        ]
        if not found:
            break
        place = -max(found)[1]
        pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
    return [byte for piece in pieces for byte in ([piece] if piece in scores else as_bytes(piece))]


def as_bytes(piece: str) -> list[str]:
    return [f"<0x{octet:02X}>" for octet in piece.encode()]


@given(st.text("abc ée\n你", max_size=24))
@example("  a abc  bca")
def test_pieces_are_merged_by_their_scores(text: str) -> None:
    tokenizer = make_tokenizer(sentencepiece())
    if not text:
        return
    assert tokenizer.encode(text).tokens == ["<s>", *merged(text)]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_and_user_defined_tokens() -> None:
    tokenizer = make_tokenizer(sentencepiece())
    assert tokenizer.encode("a</s>b<tool>c").tokens[:4] == ["<s>", "▁a", "</s>", "▁b"]
    assert "<tool>" in tokenizer.encode("ab<tool>c").tokens
    assert tokenizer.decode(tokenizer.encode("a<tool></s>").ids) == "a<tool>"
    assert tokenizer.get_vocab_size() == len(sentencepiece()["tokenizer.ggml.tokens"])


def test_flags_of_the_file() -> None:
    tokens = make_tokenizer(sentencepiece(add_bos_token=False, add_eos_token=True, add_space_prefix=False)).encode("ab")
    assert tokens.tokens == ["ab", "</s>"]
    assert make_tokenizer(sentencepiece(bos_token_id=2**32 - 1)).encode("a").tokens == ["▁a"]


def test_gemmas_pieces_are_merged_in_the_order_of_the_file() -> None:
    values = sentencepiece() | {"general.architecture": "gemma3"}
    tokens = ["  " if token == "▁▁" else token for token in values["tokenizer.ggml.tokens"]]
    tokenizer = make_tokenizer(values | {"tokenizer.ggml.tokens": tokens})
    assert tokenizer.encode("abc").tokens == ["<s>", "abc"], "ab, then abc"
    assert tokenizer.encode("a  b").tokens == ["<s>", "a", "▁▁", "b"]
    assert tokenizer.decode(tokenizer.encode(" a  b").ids) == " a  b"


def byte_level(pre: Any, **changes: Any) -> dict[str, Any]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", "123 4", "Ġ a", "a b", "Ġa b"]
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), "hello", "<|im_end|>", "<think>", "<s>"]
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL, USER_DEFINED, CONTROL]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.eos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


@pytest.mark.parametrize(
    ("pre", "digits", "word"),
    [
        ("gpt-2", ["1234"], 5),
        ("smollm", ["1", "2", "3", "4"], 5),
        ("llama-bpe", ["123", "4"], 1),
        ("dbrx", ["123", "4"], 5),
        ("qwen2", ["1", "2", "3", "4"], 5),
        ("tekken", ["1", "2", "3", "4"], 1),
        ("gpt-4o", ["123", "4"], 5),
    ],
)
def test_text_is_cut_as_the_file_says(pre: str, digits: list[str], word: int) -> None:
    """The token "hello" is no merge: only tokenizers that look whole words up find it."""
    tokenizer = make_tokenizer(byte_level(pre, add_bos_token=False))
    assert tokenizer.encode("1234").tokens == digits
    assert len(tokenizer.encode("hello").tokens) == word
    assert tokenizer.encode("ab<think>ab<|im_end|>").tokens == ["ab", "<think>", "ab", "<|im_end|>"]
    text = "Ça va, 你好? 🎉\n\n  x's = 1234"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert Tokenizer.from_str(tokenizer.to_str()).encode(text).ids == tokenizer.encode(text).ids


@pytest.mark.parametrize(
    ("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)]
)
def test_bos_where_the_file_says_nothing(pre: str, begins: bool) -> None:
    assert (make_tokenizer(byte_level(pre)).encode("ab").tokens == ["<s>", "ab"]) is begins
    assert make_tokenizer(byte_level(pre)).encode("ab", add_special_tokens=False).tokens == ["ab"]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o"])
@given(text=st.text("aB1é .'sS\n\t-/漢", max_size=30))
def test_text_is_cut_as_transformers_cuts_it(pre: str, text: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    ours = make_tokenizer(byte_level(pre)).pre_tokenizer
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
    theirs = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_answers_end_with_all_that_llama_cpp_ends_them_with() -> None:
    values = byte_level("qwen2")
    tokens = values["tokenizer.ggml.tokens"]
    end = tokens.index("<|im_end|>")
    assert stop_token_ids(values) == [tokens.index("<s>"), end]
    assert stop_token_ids(values | {"tokenizer.ggml.eos_token_id": end, "tokenizer.ggml.eot_token_id": 7}) == [end, 7]
    assert stop_token_ids({}) == []
    assert special_tokens(values) == {"bos_token": "<s>", "eos_token": "<s>"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (byte_level("deepseek-v9"), r"its text is cut as tokenizer.ggml.pre='deepseek-v9' says \(served: gpt-2, .*\)"),
        (byte_level(None), "tokenizer.ggml.pre=None says"),
        (byte_level("qwen2", model="bert"), r"its tokenizer is of the kind 'bert' \(served: 'gpt2', 'llama'\)"),
        (byte_level("qwen2", model=np.zeros(3)), "its tokenizer is of the kind array"),
        (byte_level(["a"]), r"tokenizer.ggml.pre=\['a'\] says"),
        (byte_level("qwen2", merges=None), "it has no tokenizer.ggml.merges"),
        (byte_level("qwen2", merges=["a b c"]), "tokenizer.ggml.merges has an entry that is no pair"),
        (byte_level("qwen2", merges=["q q"]), "its tokenizer cannot be made: "),
        (byte_level("qwen2", tokens=[]), "it has no tokenizer.ggml.tokens"),
        (byte_level("qwen2", tokens=["a", "b", "a"]), "tokenizer.ggml.tokens has 'a' twice"),
        (byte_level("qwen2", tokens=["a" * 600]), "tokenizer.ggml.tokens has an entry of more than 512 characters"),
        (byte_level("qwen2", token_type=np.zeros(3)), "tokenizer.ggml.token_type has 3 entries, and there are 26"),
        (sentencepiece(scores=np.zeros(3, np.float32)), "tokenizer.ggml.scores are missing, or not one number a token"),
    ],
)
def test_what_is_not_served_names_the_way_out(values: dict[str, Any], message: str) -> None:
    with pytest.raises(GgufError, match=message) as error:
        make_tokenizer(values)
    assert '; set "tokenizer" in model.json to the hub id or the directory of the model\'s own' in str(error.value)
