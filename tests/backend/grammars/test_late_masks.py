"""On a CPU a mask is made only where a token was chosen that it does not allow, and no result differs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from logprobs_of import logprobs_of
from sampling_tables import new_table
from tokenizers import Tokenizer

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import MaskJob
from inflight.grammars.guidance import GuidanceGrammars
from inflight.grammars.spec import GrammarSpec
from inflight.sampling import Sampler
from inflight.sampling.rules import rules_of
from inflight.sampling.rules.grammar_mask import LateMask, Mask
from inflight.sampling.unusable import NO_TOKEN

from .conftest import EOS, VOCAB

WORDS = GrammarSpec(
    "json_schema", json.dumps({"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3})
)
DIGITS = GrammarSpec("regex", "[0-9]{1,6}")
TEXTS = {WORDS: ["", "[", '["a', '["a"', '["a","b"]'], DIGITS: ["", "12", "123456"]}

rows_of = st.lists(
    st.tuples(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1.0, 0.4]),
            top_p=st.sampled_from([1.0, 1.0, 0.8]),
            top_k=st.sampled_from([0, 0, 6]),
            min_p=st.sampled_from([0.0, 0.0, 0.2]),
            ignore_eos=st.booleans(),
            logprobs=st.sampled_from([None, None, 0, 2]),
            presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.5]),
            grammar=st.sampled_from([None, WORDS, DIGITS]),
        ),
        st.integers(0, 4),  # which of TEXTS
        st.integers(0, 3),  # drafts
        st.sampled_from([0.0, 8.0, 30.0]),  # how much the model prefers what is allowed
    ),
    min_size=1,
    max_size=6,
)


@example(drawn=[(SamplingParams(temperature=0.0, grammar=WORDS), 2, 1, 0.0)], seed=1, poison=False)
@given(drawn=rows_of, seed=st.integers(0, 2**20), poison=st.booleans())
def test_the_same_tokens_as_with_the_masks_made_first(
    grammars: GuidanceGrammars, tokenizer: Tokenizer, drawn: list, seed: int, poison: bool
) -> None:
    rng = torch.Generator().manual_seed(seed)
    table = new_table(len(drawn), VOCAB, "cpu", rules_of(grammars))
    tokens = np.zeros((len(drawn), 64), dtype=np.int32)
    slots, positions, preferred = [], [], []
    for slot, (params, which, num_drafts, preference) in enumerate(drawn):
        table.set_row(slot, params, seed + slot, [EOS], 2)
        texts = TEXTS.get(params.grammar, [""])  # type: ignore[call-overload]
        ids = tokenizer.encode(texts[which % len(texts)], add_special_tokens=False).ids
        length = 2 + len(ids)
        tokens[slot, 2:length] = ids
        drafts = torch.randint(1, VOCAB, (num_drafts,), generator=rng).tolist()
        if num_drafts and params.grammar is WORDS:
            drafts[0] = tokenizer.encode("[", add_special_tokens=False).ids[0]
        tokens[slot, length : length + num_drafts] = drafts
        for draft in range(num_drafts + 1):
            slots.append(slot)
            positions.append(length + draft)
            preferred.append((params, ids, drafts[:draft], preference))
    logits = torch.randn(len(slots), VOCAB, generator=rng) * 3
    for row, (params, ids, drafts, preference) in enumerate(preferred):
        if params.grammar is not None:
            sequence = grammars.new(params.grammar)
            sequence.advance([*ids, *drafts])
            bits = np.zeros((1, VOCAB // 32), dtype=np.int32)
            grammars.fill([MaskJob(sequence, 0, [])], bits)
            is_allowed = np.unpackbits(bits.view(np.uint8), count=VOCAB, bitorder="little")
            logits[row] += torch.from_numpy(is_allowed).float() * preference
    if poison:
        logits[0, 77] = float("nan")
    metadata = table.select(slots, positions, tokens)
    late = Sampler()(logits, metadata)
    for index, mask in enumerate(metadata.masks):
        assert isinstance(mask, LateMask)
        metadata.masks[index] = Mask(mask.ops, mask.rows, mask.jobs, mask.make)
    first = Sampler()(logits, metadata)
    differ = np.flatnonzero((late.token_ids != first.token_ids).numpy()).tolist()
    chosen = first.token_ids.tolist()
    for row in differ:  # only behind a draft that is refused, where no token counts
        drafts = preferred[row][2]
        assert drafts != chosen[row - len(drafts) : row]
    assert not poison or late.token_ids[0] == NO_TOKEN
    assert late.failures == first.failures
    assert repr(logprobs_of(late)) == repr(logprobs_of(first))  # NaN where the model's logits are


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_mask_is_made_for_a_model_that_writes_what_it_should(
    grammars: GuidanceGrammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    made: list[int] = []
    fill = GuidanceGrammars.fill

    def counting(self: GuidanceGrammars, jobs: list[MaskJob], *args: Any, **options: Any) -> None:
        made.append(len(jobs))
        fill(self, jobs, *args, **options)

    monkeypatch.setattr(GuidanceGrammars, "fill", counting)
    table = new_table(3, VOCAB, "cpu", rules_of(grammars))
    for slot in range(3):
        table.set_row(slot, SamplingParams(temperature=temperature, grammar=DIGITS), slot, [EOS], 2)
    digit, letter = (tokenizer.encode(text, add_special_tokens=False).ids[0] for text in ("7", "x"))
    logits = torch.zeros(3, VOCAB)
    logits[:, digit] = 60.0
    tokens = np.zeros((3, 8), dtype=np.int32)
    metadata = table.select([0, 1, 2], [2, 2, 2], tokens)
    assert Sampler()(logits, metadata).token_ids.tolist() == [digit] * 3
    assert made == []
    logits[1, letter] = 90.0
    metadata = table.select([0, 1, 2], [2, 2, 2], tokens)
    assert Sampler()(logits, metadata).token_ids.tolist() == [digit] * 3
    assert made == [1], "that of the row whose token is not allowed"
