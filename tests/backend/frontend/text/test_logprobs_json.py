"""JSON of log probabilities: identical to the output of `json.dumps`."""

from __future__ import annotations

import json
import math

import numpy as np
from frontend_rig import demo_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.logprobs import Logprobs, TokenLogprobs
from inflight.frontend.text.logprobs_json import entry_texts, joined_texts
from inflight.frontend.text.tokenizer import Tokenizer

TOKENIZER = demo_tokenizer()

# Logits are anything that float32 has; most log probabilities are between -20 and 0, some of them just below 0.
values = st.one_of(
    st.floats(width=32),
    st.floats(-20, 0, width=32),
    st.integers(-150, 0).map(lambda exponent: float(np.float32(-(2.0**exponent)))),
)
triples = st.tuples(st.integers(0, TOKENIZER.size + 5), values, st.integers(1, 2**31 - 1))


def expected(tokenizer: Tokenizer | None, entries: list[TokenLogprobs]) -> str:
    """Definition."""
    rows = []
    for entry in entries:
        row = {
            str(token_id): {
                "logprob": logprob if math.isfinite(logprob) else -9999.0,
                "rank": rank,
                "decoded_token": None if tokenizer is None else tokenizer.token_text(token_id),
            }
            for token_id, logprob, rank in entry
        }
        rows.append(row or None)
    return json.dumps(rows)


@given(
    entries=st.lists(st.lists(triples, max_size=6, unique_by=lambda triple: triple[0]), max_size=4), spelt=st.booleans()
)
def test_the_text_is_that_of_json_dumps(entries: list[TokenLogprobs], spelt: bool) -> None:
    # As the sampler has it: a token that is among the most likely comes once more, with the same numbers.
    entries = [[*entry, entry[0]] if number % 2 and entry else entry for number, entry in enumerate(entries)]
    tokenizer = TOKENIZER if spelt else None
    logprobs = Logprobs.of(entries)
    texts = entry_texts(logprobs, tokenizer)
    assert len(texts) == len(entries)
    assert joined_texts(texts) == expected(tokenizer, entries)


def test_texts_of_special_tokens_and_broken_characters_are_escaped() -> None:
    entries = [[(token, -1.0, 1)] for token in range(300)]
    assert joined_texts(entry_texts(Logprobs.of(entries), TOKENIZER)) == expected(TOKENIZER, entries)
    assert entry_texts(Logprobs([0, 0]), TOKENIZER) == ["null", "null"]
    assert joined_texts([]) == "[]"


@given(entries=st.lists(st.lists(triples, max_size=4), max_size=6), data=st.data())
def test_the_arrays_are_a_sequence_of_entries(entries: list[TokenLogprobs], data: st.DataObject) -> None:
    logprobs = Logprobs.of(entries)

    def same(found: Logprobs, wanted: list[TokenLogprobs]) -> bool:
        return len(found) == len(wanted) and repr(list(found)) == repr(wanted)  # repr: NaN does not equal itself

    assert same(logprobs, entries)
    start, stop = (data.draw(st.integers(0, 7)) for _ in range(2))
    assert same(logprobs[start:stop], entries[start:stop])
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=4).filter(lambda sizes: sum(sizes) <= len(entries)))
    parts = list(logprobs.split(sizes))
    ends = np.cumsum([0, *sizes]).tolist()
    assert all(same(part, entries[a:b]) for part, a, b in zip(parts, ends, ends[1:]))
    assert same(Logprobs.joined([*parts, logprobs[sum(sizes) :]]), entries)
    full = [entry for entry in entries if entry]
    assert Logprobs().first_values() == []
    assert repr(Logprobs.of(full).first_values()) == repr([entry[0][1] for entry in full])
