"""Texts to tokens with the merges of a BPE in three arrays, for a process that encodes short texts only.

The model of the library `tokenizers` has a string and 70 bytes of hash tables for each token, twice: 35 MiB for 150,000
tokens, in every process.  Here the library normalises a text, finds added tokens and splits the rest into words, with a
model that knows only letters; the merges are 16 bytes each.  A word is merged like
https://github.com/huggingface/tokenizers/blob/main/tokenizers/src/models/bpe/word.rs does it: the pair of the lowest
rank first, the leftmost of several.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

__all__ = ["LettersAndMerges", "letters_and_merges"]

_PLAIN = {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"}
_NO_MERGE = 2**32 - 1
_MAX_WORDS = 4096  # whose tokens are remembered


class LettersAndMerges:
    """A BPE.

    Args:
        letters: the library's tokenizer, whose model has no merges.
        token_ids: by the ids of `letters`.
        left, right, made: token ids of M merges, in the order of their ranks.

    Raises:
        ValueError: a token is made in two ways, where the order of merges depends on more than their ranks.
    """

    def __init__(
        self, letters: Any, token_ids: dict[int, int], left: list[int], right: list[int], made: list[int]
    ) -> None:
        pairs = np.array(left, dtype=np.uint64) << np.uint64(32) | np.array(right, dtype=np.uint64)
        order = np.argsort(pairs, kind="stable")
        if len({*made}) < len(made) or (np.diff(pairs[order]) == 0).any():
            raise ValueError("a token is made of two pairs, or a pair makes two tokens")
        self._letters = letters
        self._token_ids = token_ids
        # Not numpy's arrays, whose elements take ten times as long to read one by one.
        self._pairs = array("Q", pairs[order].tobytes())
        self._ranks = array("I", order.astype(np.uint32).tobytes())
        self._made = array("I", made)
        self._merged = lru_cache(_MAX_WORDS)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Token ids, without the special tokens that a post-processor adds."""
        encoding = self._letters.encode(text, add_special_tokens=False)
        token_ids = self._token_ids
        places = zip(encoding.word_ids, encoding.ids)
        words = (tuple(token_ids[letter] for _, letter in word) for _, word in groupby(places, lambda place: place[0]))
        return [token for word in words for token in self._merged(word)]

    def _merge(self, word: Sequence[int]) -> list[int]:
        tokens = [*word]
        ranks = [self._rank(one, other) for one, other in zip(tokens, tokens[1:])]  # of each token and the next
        while ranks and (lowest := min(ranks)) != _NO_MERGE:
            place = ranks.index(lowest)
            tokens[place : place + 2] = [self._made[lowest]]
            del ranks[place]
            if place:
                ranks[place - 1] = self._rank(tokens[place - 1], tokens[place])
            if place < len(ranks):
                ranks[place] = self._rank(tokens[place], tokens[place + 1])
        return tokens

    def _rank(self, one: int, other: int) -> int:
        pair = one << 32 | other
        place = bisect_left(self._pairs, pair)
        return self._ranks[place] if place < len(self._pairs) and self._pairs[place] == pair else _NO_MERGE


def letters_and_merges(parts: dict[str, Any], merges: Sequence[Sequence[str]]) -> LettersAndMerges | None:
    """None if the model has options that change how words are merged, or if the library would number added tokens anew.

    Args:
        parts: of tokenizer.json, of a BPE.
        merges: of the model, in pairs.

    Raises:
        KeyError, ValueError: merges of tokens that the vocabulary does not have; or see `LettersAndMerges`.
    """
    from tokenizers import AddedToken, Tokenizer, models

    model, added = parts["model"], parts["added_tokens"]
    vocab: dict[str, int] = model["vocab"]
    if any(model.get(option) for option in _PLAIN) or not _are_numbered(added, vocab):
        return None
    known = {letter: place for place, letter in enumerate(entry for entry in vocab if len(entry) == 1)}
    letters: Any = Tokenizer.from_str(
        json.dumps({**parts, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}})
    )
    letters.no_truncation()
    letters.no_padding()
    letters.model = models.BPE(vocab=known, merges=[])
    letters.add_tokens([AddedToken(**{name: token[name] for name in token if name != "id"}) for token in added])
    of_added = {token["content"]: token["id"] for token in added}
    token_ids = {place: vocab[letter] for letter, place in known.items()}
    for place, token in letters.get_added_tokens_decoder().items():
        token_ids[place] = of_added[token.content]
    left = [vocab[one] for one, _ in merges]
    right = [vocab[other] for _, other in merges]
    return LettersAndMerges(letters, token_ids, left, right, [vocab[one + other] for one, other in merges])


def _are_numbered(added: list[dict[str, Any]], vocab: dict[str, int]) -> bool:
    """Whether added tokens have the ids that the library gives them, whatever a file says."""
    following = len(vocab)
    for token in added:
        if token["id"] != vocab.get(token["content"], following):
            return False
        following = max(following, token["id"] + 1)
    return True
