"""Rows with draft tokens: one call with k + 1 rows per slot is k + 1 calls, and refused drafts leave no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logprobs_of import logprobs_of
from sampling_tables import new_table

from inflight.engine.sampling_params import SamplingParams
from inflight.sampling import Sampler
from inflight.sampling.sampler import edit_logits

V = 41
NUM_SLOTS = 4
EOS = (2, 7)
sample = Sampler()

# Few different tokens, so that words match, counts rise and drafts repeat what was there before.
token = st.integers(0, 3)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8]),
    top_p=st.sampled_from([1.0, 0.9]),
    # More than the other rules can ban, so that a token is left.
    allowed_token_ids=st.none() | st.lists(st.integers(0, V - 1), min_size=10, max_size=14, unique=True),
    logit_bias=st.none() | st.dictionaries(st.integers(0, V - 1), st.floats(-8, 8, width=32), max_size=3),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=2),
    bad_words_ids=st.lists(st.lists(token, max_size=4), max_size=6),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    logprobs=st.sampled_from([None, 2]),
)
row_strategy = st.tuples(params_strategy, st.lists(token, min_size=1, max_size=6))
# Of a slot in a step: the drafts, how many of them are accepted, the token behind those, what overwrites the rest.
turn_strategy = st.tuples(st.lists(token, max_size=4), st.integers(0, 4), token, token)
step_strategy = st.dictionaries(st.integers(0, NUM_SLOTS - 1), turn_strategy, min_size=1)


def check_alone(params, prompt, seed, tokens, position, logits, edited, chosen, logprobs) -> None:
    """A table that has seen nothing before gives the same for this row alone."""
    table = new_table(1, V)
    table.set_row(0, params, seed, EOS, len(prompt))
    metadata = table.select([0], [position], tokens[None, :position])
    assert torch.equal(edit_logits(logits, metadata)[0], edited)
    output = sample(logits, metadata)
    assert output.token_ids.tolist() == [chosen]
    assert logprobs_of(output).get(0) == logprobs


@settings(deadline=None, derandomize=True)
@given(
    st.lists(row_strategy, min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    st.lists(step_strategy, min_size=1, max_size=6),
)
def test_rows_with_drafts_equal_separate_calls_with_the_same_tokens(drawn, steps):
    table = new_table(NUM_SLOTS, V)
    tokens = np.full((NUM_SLOTS, 64), 40, dtype=np.int32)
    num_tokens = [len(prompt) for _, prompt in drawn]
    for slot, (params, prompt) in enumerate(drawn):
        table.set_row(slot, params, slot, EOS, len(prompt))
        tokens[slot, : len(prompt)] = prompt
    for number, step in enumerate(steps):
        rows = []
        for slot, (drafts, *_) in step.items():
            tokens[slot, num_tokens[slot] : num_tokens[slot] + len(drafts)] = drafts
            rows += [(slot, num_tokens[slot] + i) for i in range(len(drafts) + 1)]
        logits = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(number)) * 3
        metadata = table.select([slot for slot, _ in rows], [position for _, position in rows], tokens)
        output, edited = sample(logits, metadata), edit_logits(logits, metadata)
        for i, (slot, position) in enumerate(rows):
            check_alone(
                *drawn[slot], slot, tokens[slot], position,
                logits[i : i + 1], edited[i], int(output.token_ids[i]), logprobs_of(output).get(i),
            )  # fmt: skip
        for slot, (drafts, accepted, following, garbage) in step.items():
            num_tokens[slot] += min(accepted, len(drafts)) + 1
            tokens[slot, num_tokens[slot] - 1] = following
            tokens[slot, num_tokens[slot] :] = garbage


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_penalties_count_the_drafts_before_a_row_and_then_only_accepted_ones(accepted):
    table = new_table(1, V)
    table.set_row(0, SamplingParams(temperature=0.0, frequency_penalty=1.0), 0, [], 1)
    tokens = np.array([[9, 5, 5, 6, 0, 0, 0]], dtype=np.int32)  # prompt 9, output 5, drafts 5 and 6

    def penalised(positions: list[int]) -> list[dict[int, float]]:
        edited = edit_logits(torch.zeros(len(positions), V), table.select([0] * len(positions), positions, tokens))
        return [{i: x for i, x in enumerate(row) if x} for row in edited.tolist()]

    assert penalised([2, 3, 4]) == [{5: -1.0}, {5: -2.0}, {5: -2.0, 6: -1.0}]
    tokens[0, 2 + accepted :] = 8
    expected: dict[int, float] = {}
    for t in tokens[0, 1 : 3 + accepted].tolist():
        expected[t] = expected.get(t, 0.0) - 1.0
    assert penalised([3 + accepted]) == [expected]


def test_bad_words_see_the_drafts_before_a_row():
    table = new_table(1, V)
    table.set_row(0, SamplingParams(temperature=0.0, bad_words_ids=[[5, 6, 7], [6, 8]]), 0, [], 1)
    tokens = np.array([[5, 5, 6, 7]], dtype=np.int32)
    edited = edit_logits(torch.zeros(3, V), table.select([0] * 3, [2, 3, 4], tokens))
    assert torch.isinf(edited).nonzero().tolist() == [[1, 7], [1, 8]]


def test_min_tokens_count_by_position():
    table = new_table(2, V)
    table.set_row(1, SamplingParams(temperature=0.0, min_tokens=2), 0, [3], 4)
    table.set_row(0, SamplingParams(temperature=0.0), 0, [3], 4)
    edited = edit_logits(torch.zeros(5, V), table.select([1, 1, 1, 1, 0], [4, 5, 6, 7, 4]))
    assert torch.isinf(edited).nonzero().tolist() == [[0, 3], [1, 3]]
