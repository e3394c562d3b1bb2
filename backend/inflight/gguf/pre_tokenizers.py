"""How text is cut before its bytes are merged, by the names that llama.cpp has for it (tokenizer.ggml.pre)."""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER + r"%s" + _LOWER + r"%s"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_REST}"
_TEKKEN = "|".join([_CASED % ("*", "+"), _CASED % ("+", "*"), r"\p{N}", _MARKS])
_GPT4O = "|".join([_CASED % ("*", "+") + f"{_ENDINGS}?", _CASED % ("+", "*") + f"{_ENDINGS}?", r"\p{N}{1,3}", _MARKS])


class PreTokenizer(NamedTuple):
    """
    Attributes:
        whole_words: a word that is in the vocabulary is one token, whatever the merges say.
        begins: with BOS, unless the file says otherwise.
    """

    cuts: Any
    normalizer: Any = None
    whole_words: bool = False
    begins: bool = False


def _by(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


_PLAIN = PreTokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False))
_DIGITS = PreTokenizer(_digits())
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3"), PreTokenizer(_by(_LLAMA3), whole_words=True, begins=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(_by(_LLAMA3))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer(_by(_QWEN2), normalizers.NFC())),
    "tekken": PreTokenizer(_by(_TEKKEN), whole_words=True, begins=True),
    "gpt-4o": PreTokenizer(_by(_GPT4O)),
}
