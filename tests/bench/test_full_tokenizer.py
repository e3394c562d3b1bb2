"""bench/make_full_tokenizer.py: a tokenizer.json from tokens and ranks alone."""

from __future__ import annotations

import json

import make_full_tokenizer
from tokenizers import Tokenizer


def test_a_token_is_merged_from_the_parts_that_lower_ranks_leave() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {token: 256 + place for place, token in enumerate((b"he", b" t", b"the", b" the", "é".encode()))}
    made = make_full_tokenizer._tokenizer(ranks)
    assert made["model"]["merges"] == [["h", "e"], ["Ġ", "t"], ["t", "he"], ["Ġt", "he"], ["Ã", "©"]]
    tokenizer = Tokenizer.from_str(json.dumps(made))
    assert tokenizer.encode("the the é<think>").tokens == ["the", "Ġthe", "Ġ", "Ã©", "<think>"]
    assert tokenizer.decode(tokenizer.encode("the the é<think>").ids) == "the the é<think>"
    assert tokenizer.token_to_id("<|endoftext|>") == len(ranks)
