"""The bytes of each token, read from tokenizer.json: what a grammar sees of a vocabulary."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from inflight.grammars.merges import LettersAndMerges, MergeTables, merge_tables

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
    tokenizer = _read(tokenizer_json)
    encode, added = tokenizer.encode, tokenizer.added
    # Some put a space before a text, and none before a text that goes on behind a letter.
    anchor = encode("a")

    def encode_within(text: str) -> list[int]:
        ids = encode("a" + text)
        if ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
        return encode(text)

    specials = {token: content for token, (content, is_special) in added.items() if is_special}
    found = Vocabulary([], [*specials], {content: token for token, content in specials.items()}, encode_within)
    # Last: what is made beside them would keep memory that they leave.
    to_bytes = _bytes_of(tokenizer.decoder)
    tokens = [b""] * (max([*tokenizer.entries.values(), *added], default=-1) + 1)
    for text, token in tokenizer.entries.items():
        tokens[token] = to_bytes(text)
    for token, (content, _) in added.items():
        tokens[token] = content.encode()
    found.tokens = tokens
    return found


class _Entries:
    """A vocabulary in three large objects: text -> token id."""

    def __init__(self, vocab: dict[str, int]) -> None:
        self._text = "".join(vocab)
        self._ends = array("I", accumulate(map(len, vocab)))
        self._ids = array("I", vocab.values())

    def values(self) -> Iterable[int]:
        return self._ids

    def items(self) -> Iterable[tuple[str, int]]:
        start = 0
        for end, token in zip(self._ends, self._ids):
            yield self._text[start:end], token
            start = end


class _Tokenizer(NamedTuple):
    """The parts of a tokenizer that a vocabulary is made of.

    Attributes:
        entries: id of each token as tokenizer.json writes it, perhaps without added ones.
        added: content of each added token, by its id, and whether it is special.
        decoder: as tokenizer.json has it.
        encode: text -> token ids.
    """

    entries: dict[str, int] | _Entries
    added: dict[int, tuple[str, bool]]
    decoder: dict[str, Any] | None
    encode: Callable[[str], list[int]]


def _read(tokenizer_json: str) -> _Tokenizer:
    """The tokenizer that `Tokenizer.from_str` reads, in less memory: most BPEs in a tenth, any in three quarters.

    The library's own parser leaves tables among what it frees.
    """
    from tokenizers import Tokenizer

    with contextlib.suppress(Exception):  # the library has words for what is wrong
        tables = _tables(tokenizer_json)
        if tables is not None:
            return _merged_here(*tables)
        compact = _compact(_parts(tokenizer_json))
        if compact is not None:
            return _of_the_library(*compact)
    tokenizer: Any = Tokenizer.from_str(tokenizer_json)
    return _of_the_library(tokenizer, tokenizer.get_vocab(with_added_tokens=True))


def _tables(tokenizer_json: str) -> tuple[MergeTables, _Entries] | None:
    """None if the words of this tokenizer are not merged by the ranks of pairs alone."""
    parts = _parts(tokenizer_json)
    model = parts["model"]
    tables = merge_tables(parts, _pairs(model["merges"])) if _is_known_bpe(model) else None
    return None if tables is None else (tables, _Entries(model["vocab"]))


def _merged_here(tables: MergeTables, entries: _Entries) -> _Tokenizer:
    parts = json.loads(tables.rest)
    added = {token["id"]: (token["content"], token["special"]) for token in parts["added_tokens"]}
    return _Tokenizer(entries, added, parts["decoder"], LettersAndMerges(tables).encode)


def _parts(tokenizer_json: str) -> dict[str, Any]:
    """Of tokenizer.json.

    `msgspec`, which is faster, remembers keys that it has read, and each would keep a page or more of what is freed.
    """
    parts = msgspec.json.decode(tokenizer_json, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(parts.pop("model"), type=dict[str, msgspec.Raw])
    vocab = json.loads(bytes(model.pop("vocab")))
    decoded = {name: msgspec.json.decode(part) for name, part in parts.items()}
    return {**decoded, "model": {"vocab": vocab, **{name: msgspec.json.decode(part) for name, part in model.items()}}}


def _of_the_library(tokenizer: Any, vocabulary: dict[str, int]) -> _Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _Tokenizer(
        vocabulary,
        {token: (added.content, added.special) for token, added in tokenizer.get_added_tokens_decoder().items()},
        None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__()),
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
    )


def _is_known_bpe(model: dict[str, Any]) -> bool:
    return model.get("type") == "BPE" and {*model} <= {"type", "vocab", "merges", *_BPE_OPTIONS}


def _pairs(merges: list[Any]) -> list[Any]:
    """Older versions wrote a pair as one text."""
    return [merge.split(" ") for merge in merges] if merges and isinstance(merges[0], str) else merges


def _compact(parts: dict[str, Any]) -> tuple[Any, dict[str, int]] | None:
    """The tokenizer, its tables made apart from the rest, and its tokens; None if its model is not known here.

    Args:
        parts: of tokenizer.json; is changed.
    """
    from tokenizers import AddedToken, Tokenizer, models

    model, added = parts["model"], parts["added_tokens"]
    if not _is_known_bpe(model):
        return None
    vocab, merges = model["vocab"], _pairs(model["merges"])
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
