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
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

__all__ = ["LettersAndMerges", "MergeTables", "merge_tables"]

_PLAIN = {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"}
_NO_MERGE = 2**32 - 1
_MAX_WORDS = 4096  # whose tokens are remembered


class MergeTables(NamedTuple):
    """A BPE with M merges, in a few large objects.

    Small ones that outlive the reading of a tokenizer, and lie among what is freed then, would keep MiBs of it.

    Attributes:
        rest: tokenizer.json without merges, and with no tokens but letters and added ones.
        pairs: sorted, token ids of a left part << 32 | of a right part.
        ranks: of `pairs`.
        made: token id by rank.
    """

    rest: str
    pairs: array[int]
    ranks: array[int]
    made: array[int]


class LettersAndMerges:
    """A BPE."""

    def __init__(self, tables: MergeTables) -> None:
        from tokenizers import AddedToken, Tokenizer, models

        parts = json.loads(tables.rest)
        added, vocab = parts["added_tokens"], parts["model"]["vocab"]
        parts["added_tokens"], parts["model"]["vocab"] = [], {}
        letters: Any = Tokenizer.from_str(json.dumps(parts))
        letters.no_truncation()
        letters.no_padding()
        letters.model = models.BPE(vocab={letter: place for place, letter in enumerate(vocab)}, merges=[])
        letters.add_tokens([AddedToken(**{name: token[name] for name in token if name != "id"}) for token in added])
        of_added = {token["content"]: token["id"] for token in added}
        self._letters = letters
        self._token_ids = dict(enumerate(vocab.values()))  # by the ids of `letters`
        for place, token in letters.get_added_tokens_decoder().items():
            self._token_ids[place] = of_added[token.content]
        self._pairs, self._ranks, self._made = tables.pairs, tables.ranks, tables.made
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
        ranks = [self._rank(one, other) for one, other in pairwise(tokens)]  # of each token and the next
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


def merge_tables(parts: dict[str, Any], merges: Sequence[Sequence[str]]) -> MergeTables | None:
    """None if more than the ranks of pairs says how words are merged, or if the library would number added tokens anew.

    Args:
        parts: of tokenizer.json, of a BPE.
        merges: of the model, in pairs.

    Raises:
        KeyError: merges of tokens that the vocabulary does not have.
    """
    model, vocab = parts["model"], parts["model"]["vocab"]
    if any(model.get(option) for option in _PLAIN) or not _are_numbered(parts["added_tokens"], vocab):
        return None
    left = np.array([vocab[one] for one, _ in merges], dtype=np.uint64)
    right = np.array([vocab[other] for _, other in merges], dtype=np.uint64)
    made = array("I", [vocab[one + other] for one, other in merges])
    pairs = left << np.uint64(32) | right
    order = np.argsort(pairs, kind="stable")
    # Of a token that is made of two pairs, the library takes an outdated merge for one that is possible.
    if len({*made}) < len(made) or (np.diff(pairs[order]) == 0).any():
        return None
    known = {entry: token for entry, token in vocab.items() if len(entry) == 1}
    rest = json.dumps({**parts, "model": {"type": "BPE", "vocab": known, "merges": []}})
    # Not numpy's arrays, whose elements take ten times as long to read one by one.
    return MergeTables(rest, array("Q", pairs[order].tobytes()), array("I", order.astype(np.uint32).tobytes()), made)


def _are_numbered(added: list[dict[str, Any]], vocab: dict[str, int]) -> bool:
    """Whether added tokens have the ids that the library gives them, whatever a file says."""
    following = len(vocab)
    for token in added:
        if token["id"] != vocab.get(token["content"], following):
            return False
        following = max(following, token["id"] + 1)
    return True
