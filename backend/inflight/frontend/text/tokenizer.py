"""Text to token ids and back.  No torch, no Triton.

`Tokenizer` reads a checkpoint's `tokenizer.json` with the `tokenizers` library.  A checkpoint
without one (a slow tokenizer) goes through `transformers.AutoTokenizer`, which is imported only
then, because it imports torch if torch is installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from inflight.heap import trim_heap
from inflight.hub import CheckpointFileError, checkpoint_file

__all__ = ["Tokenizer", "TokenizerError", "read_text"]


class TokenizerError(CheckpointFileError):
    """The checkpoint's tokenizer cannot be used; the message says why."""


def read_text(path: Path) -> str:
    """A text file of a checkpoint.

    Raises:
        TokenizerError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from None


class _Backend(Protocol):
    """The interface to a tokenizer library.

    Attributes:
        concatenates: the text of tokens of whole characters is the concatenation of the text of each.
    """

    concatenates: bool

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def encode_pair(self, one: str, other: str) -> tuple[list[int], list[int]]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def decode_all(self, ids: list[int]) -> str: ...
    def entry(self, token_id: int) -> str: ...
    def special_tokens(self) -> dict[str, int]: ...
    def size(self) -> int: ...
    def longest_token(self) -> int: ...


class _Fast:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import ByteLevel

        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.decode = tokenizer.decode
        self.concatenates = isinstance(tokenizer.decoder, ByteLevel)  # it joins bytes, and looks at nothing else

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Not `encode`, which holds Python's lock: a long text would stop all threads of the process for seconds.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_pair(self, one: str, other: str) -> tuple[list[int], list[int]]:
        (encoding,) = self._tokenizer.encode_batch_fast([(one, other)], add_special_tokens=True)
        return encoding.ids, encoding.type_ids

    def decode_all(self, ids: list[int]) -> str:
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=False)  # `decode` holds Python's lock
        return text

    def entry(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def special_tokens(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))


class _Slow:
    """A `transformers` tokenizer written in Python."""

    concatenates = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_pair(self, one: str, other: str) -> tuple[list[int], list[int]]:
        found = self._tokenizer(one, other, return_token_type_ids=True)
        return found["input_ids"], found["token_type_ids"]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def decode_all(self, ids: list[int]) -> str:
        return self.decode(ids, False)

    def entry(self, token_id: int) -> str:
        return self._tokenizer.convert_ids_to_tokens(token_id) or ""

    def special_tokens(self) -> dict[str, int]:
        added = self._tokenizer.added_tokens_decoder
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def size(self) -> int:
        return len(self._tokenizer)

    def longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))


# A checkpoint without any of these has no tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


class _Absent:
    """The tokenizer of a checkpoint without one: token ids have no text, and text has no token ids."""

    concatenates = False

    def __init__(self, source: str) -> None:
        self._source = source

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise TokenizerError(
            f"{self._source} has no tokenizer, so prompts, stop and bad words cannot be text: give token ids, or set "
            '"tokenizer" to a checkpoint that has one'
        )

    def encode_pair(self, one: str, other: str) -> tuple[list[int], list[int]]:
        return self.encode(one, True), []

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return ""

    def decode_all(self, ids: list[int]) -> str:
        return ""

    def entry(self, token_id: int) -> str:
        return ""

    def special_tokens(self) -> dict[str, int]:
        return {}

    def size(self) -> int:
        return 0

    def longest_token(self) -> int:
        return sys.maxsize  # no text is too long; `encode`, which follows, says what is missing


class _JsonTexts(dict[int, str]):
    """Token id -> JSON text, computed on first use."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = json.dumps(self._token_text(token_id))
        return text


class _WholeTexts(dict[int, str]):
    """Token id -> the text that it decodes to alone; "" if that is not whole characters.  Computed on first use."""

    def __init__(self, decode: Callable[[Sequence[int], bool], str]) -> None:
        self._decode = decode

    def __missing__(self, token_id: int) -> str:
        text = self._decode([token_id], True)
        if "\ufffd" in text:  # part of a character
            text = ""
        self[token_id] = text
        return text


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        size: entries of the vocabulary, added tokens included.
        longest_token: characters of the longest entry; a text of more than n times as many
            characters has more than n tokens.
        decode_ids: (ids, skip_special_tokens) -> text; the library's own function, which every output token passes.
        json_texts: token id -> its `token_text` as JSON.
        whole_texts: token id -> the text that it decodes to alone, "" for special tokens and parts of characters.
        concatenates: the text of several tokens of whole characters is the concatenation of their `whole_texts`.
        is_absent: the checkpoint has no tokenizer: only token ids can be served.
    """

    def __init__(self, backend: _Backend) -> None:
        self._backend = backend
        self.decode_ids = backend.decode
        self.whole_texts = _WholeTexts(backend.decode)
        self.concatenates = backend.concatenates
        self.size = backend.size()
        self.longest_token = backend.longest_token()
        self.is_absent = isinstance(backend, _Absent)
        self.json_texts = _JsonTexts(self.token_text)
        if self.is_absent:
            self._anchor, self._anchor_text = [], ""
            return
        # Some decoders drop the space in front of the first token; a letter before it keeps it.
        self._anchor = backend.encode("a", False)
        self._anchor_text = backend.decode(self._anchor, False)

    @classmethod
    def load(
        cls, source: str, *, revision: str | None = None, trust_remote_code: bool = False, required: bool = True
    ) -> Tokenizer:
        """Read the tokenizer of a checkpoint directory, GGUF file or hub id.

        Args:
            required: there must be one; if not required, a missing one is replaced by one for token ids only.

        Raises:
            TokenizerError: there is none, or it cannot be read.
        """
        if not required and not any(checkpoint_file(source, name, revision) for name in _TOKENIZER_FILES):
            return cls(_Absent(source))
        path = checkpoint_file(source, "tokenizer.json", revision)
        if path is not None:
            from tokenizers import Tokenizer as FastTokenizer

            try:
                loaded = cls(_Fast(FastTokenizer.from_file(str(path))))
            except Exception as error:  # the library raises bare Exception
                raise TokenizerError(f"{path}: not a tokenizer: {error}") from None
            trim_heap()  # as much as stays was used on the way
            return loaded
        from transformers import AutoTokenizer

        try:
            slow = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            said = " ".join(str(error).split())
            raise TokenizerError(f"{source}: no tokenizer.json, and transformers says: {said}") from None
        fast = getattr(slow, "backend_tokenizer", None)
        return cls(_Slow(slow) if fast is None else _Fast(fast))

    def check_texts(self, texts: Sequence[str]) -> None:
        """Raise TokenizerError if there are any, and no tokenizer."""
        if self.is_absent and texts:
            self.encode(texts[0])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; the checkpoint's post-processor adds special tokens.

        Raises:
            TokenizerError: the tokenizer is absent.
        """
        return self._backend.encode(text, add_special_tokens)

    def encode_pair(self, one: str, other: str) -> tuple[list[int], int]:
        """Token ids of two texts in one prompt, with the special tokens that the post-processor puts around a pair.

        Returns:
            The ids, and the first one of the second text; 0 if the tokenizer does not tell the texts apart.

        Raises:
            TokenizerError: the tokenizer is absent.
        """
        token_ids, types = self._backend.encode_pair(one, other)
        start = types.index(1) if 1 in types else 0
        return token_ids, start if all(kind == 1 for kind in types[start:]) else 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens)

    def decode_all(self, ids: list[int]) -> str:
        """Text of any number of token ids, special tokens spelt out; other threads run meanwhile."""
        return self._backend.decode_all(ids)

    def vocabulary_entry(self, token_id: int) -> str:
        """The vocabulary's entry, such as "Ġthe"; "" if the id has none."""
        return self._backend.entry(token_id)

    def special_tokens(self) -> dict[str, int]:
        """Token id of each added token that is special."""
        return self._backend.special_tokens()

    def token_id(self, entry: str) -> int | None:
        """The token whose vocabulary entry is `entry`, if a text with it has that token; None if there is none."""
        if self.is_absent:
            return None
        ids = self._backend.encode(entry, False)
        return int(ids[0]) if len(ids) == 1 and self._backend.entry(ids[0]) == entry else None

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a sentence; special tokens are spelt out."""
        return self._backend.decode([*self._anchor, token_id], False)[len(self._anchor_text) :]

    def bad_words_ids(self, words: Iterable[str]) -> list[list[int]]:
        """Token id sequences that spell each word, at the start of a text and after a space."""
        texts = (text for word in words for text in (word, " " + word.lstrip()))
        found = dict.fromkeys(tuple(self.encode(text, add_special_tokens=False)) for text in texts)
        return [list(ids) for ids in found if ids]
