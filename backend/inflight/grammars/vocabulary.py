"""The bytes of each token, read from tokenizer.json: what a grammar sees of a vocabulary."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = ["Vocabulary", "read_vocabulary"]

_SPACE = "\u2581"  # how SentencePiece writes a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BPE_OPTIONS = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)
# Decoders that give a token the same bytes at every place but the start of a text.
_WITH_SPACES = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}


@dataclass
class Vocabulary:
    """Attributes:
    tokens: bytes of each token id; of a special one, its name.
    special_ids: tokens that are never part of a text, but of their name alone.
    names: of the special tokens.
    encode: text -> token ids, as in the middle of a text.
    """

    tokens: list[bytes]
    special_ids: list[int]
    names: dict[str, int]
    encode: Callable[[str], list[int]]


def read_vocabulary(tokenizer_json: str) -> Vocabulary:
    """
    Args:
        tokenizer_json: what the library `tokenizers` reads.

    Raises:
        ValueError: a token's bytes depend on its neighbours, or the decoder is not known here.
    """
    tokenizer, vocabulary = _read(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    to_bytes = _bytes_of(None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__()))
    tokens = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, token in vocabulary.items():
        tokens[token] = to_bytes(text)
    special_ids, names = [], {}
    for token, added in tokenizer.get_added_tokens_decoder().items():
        tokens[token] = added.content.encode()
        if added.special:
            special_ids.append(token)
            names[added.content] = token
    # Some put a space before a text, and none before a text that goes on behind a letter.
    anchor = tokenizer.encode("a", add_special_tokens=False).ids

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode("a" + text, add_special_tokens=False).ids
        if ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
        return tokenizer.encode(text, add_special_tokens=False).ids

    return Vocabulary(tokens, special_ids, names, encode)


def _read(tokenizer_json: str) -> tuple[Any, dict[str, int]]:
    """`Tokenizer.from_str` and its tokens.

    A BPE takes a quarter less memory: the library's own parser leaves tables among what it frees, as `msgspec` leaves
    the keys that it remembers.
    """
    from tokenizers import Tokenizer

    with contextlib.suppress(Exception):  # the library has words for what is wrong
        found = _compact(json.loads(tokenizer_json))
        if found is not None:
            return found
    tokenizer: Any = Tokenizer.from_str(tokenizer_json)
    return tokenizer, tokenizer.get_vocab(with_added_tokens=True)


def _compact(parts: dict[str, Any]) -> tuple[Any, dict[str, int]] | None:
    """The tokenizer, its tables made apart from the rest, and its tokens; None if its model is not known here.

    Args:
        parts: of tokenizer.json; is changed.
    """
    from tokenizers import AddedToken, Tokenizer, models

    model, added = parts["model"], parts["added_tokens"]
    if model.get("type") != "BPE" or not {*model} <= {"type", "vocab", "merges", *_BPE_OPTIONS}:
        return None
    vocab, merges = model["vocab"], model["merges"]
    if merges and isinstance(merges[0], str):  # as older versions wrote them
        merges = [merge.split(" ") for merge in merges]
    options = {name: model[name] for name in _BPE_OPTIONS if model.get(name) is not None}
    parts["added_tokens"], model["vocab"], model["merges"] = [], {}, []
    tokenizer: Any = Tokenizer.from_str(json.dumps(parts))
    tokenizer.model = models.BPE(vocab=vocab, merges=msgspec.convert(merges, list[tuple[str, str]]), **options)
    tokenizer.add_tokens([AddedToken(**{name: token[name] for name in token if name != "id"}) for token in added])
    ids = {token["content"]: token["id"] for token in added}
    if sorted(tokenizer.get_added_tokens_decoder()) != sorted(ids.values()):
        return None
    return tokenizer, vocab | ids


def _bytes_of(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """From a token as the vocabulary writes it to its bytes."""
    parts = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return _byte_level
    strange = sorted(kinds - _WITH_SPACES)
    if strange or not kinds:
        raise ValueError(
            f"structured output is not possible with this checkpoint's tokenizer: its decoder is "
            f"{' and '.join(strange) or 'missing'}, and the bytes of a token must not depend on its neighbours"
        )
    replaced = [(part["pattern"].get("String"), part["content"]) for part in parts if part["type"] == "Replace"]
    if "Metaspace" in kinds:
        replaced.append((next(part["replacement"] for part in parts if part["type"] == "Metaspace"), " "))
    if any(pattern is None for pattern, _ in replaced):
        raise ValueError(
            "structured output is not possible with this checkpoint's tokenizer: its decoder replaces by expression"
        )
    falls_back = "ByteFallback" in kinds

    def with_spaces(token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if falls_back else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for pattern, content in replaced:
            token = token.replace(pattern, content)
        return token.encode()

    return with_spaces


class _Bytes(dict[int, int]):
    """From the letters of byte-level vocabularies to bytes: printable ones are themselves, others begin at U+0100."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        super().__init__({byte: byte for byte in printable})
        self.update({0x100 + place: byte for place, byte in enumerate(others)})

    def __missing__(self, letter: int) -> int:
        return sys.maxunicode  # which is no byte


_BYTES = _Bytes()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
