from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.engine.sampling_params import SamplingParams
from inflight.sampling import SampleRow, SamplingTable, sampling_metadata
from inflight.sampling.history import TokenCounts, banned_tokens
from inflight.sampling.processors import edit_logits

V = 53


def make_row(params: SamplingParams, prompt=(), output=(), seed=0, eos=(0,)) -> SampleRow:
    prompt, output = np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32)
    return SampleRow(params, seed, len(prompt) + len(output), prompt, output, eos)


def edited(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    return edit_logits(logits, sampling_metadata(rows, logits.shape[-1]))


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 4


token = st.integers(0, V - 1)
editing_params = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    logit_bias=st.none() | st.dictionaries(token, st.floats(-50, 50, width=32), max_size=5),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(token, max_size=3),
    ignore_eos=st.booleans(),
    bad_words_ids=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=4),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
)
histories = st.tuples(st.lists(token, min_size=1, max_size=12), st.lists(st.integers(0, 6), max_size=12))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(editing_params, histories), min_size=1, max_size=5), st.integers(0, 10))
def test_edits_equal_the_reference(reference, drawn, seed):
    rows = [make_row(params, prompt, output, eos=(0, 7)) for params, (prompt, output) in drawn]
    logits = random_logits(len(rows), seed)
    metadata = sampling_metadata(rows, V)
    after = edit_logits(logits, metadata)
    for row, before, got in zip(rows, logits.numpy(), after.numpy()):
        np.testing.assert_allclose(got, reference.edited(before, row), rtol=1e-6, atol=1e-6)
    if not metadata.edits_logits:
        assert torch.equal(after, logits)


def test_bias_is_added_before_penalties():
    logits = torch.full((1, V), -1.0)
    row = make_row(SamplingParams(logit_bias={3: 5.0}, repetition_penalty=2.0), prompt=[3])
    assert edited(logits, [row])[0, 3] == 2.0  # (-1 + 5) / 2, not -1 * 2 + 5


def test_repetition_penalty_covers_prompt_and_output_others_output_only():
    logits = torch.full((1, V), 2.0)
    row = make_row(
        SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5), [1, 1, 2], [2, 2, 3]
    )
    after = edited(logits, [row])[0]
    assert after[:5].tolist() == [2.0, 1.0, 1.0 - 0.5 - 0.5, 1.0 - 0.25 - 0.5, 2.0]


def test_presence_alone_leaves_prompt_tokens():
    after = edited(torch.zeros(1, V), [make_row(SamplingParams(presence_penalty=1.0), [1, 2], [3])])[0]
    assert after[:4].tolist() == [0.0, 0.0, 0.0, -1.0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_eos_and_stop_ids_until_reached(ignore_eos):
    params = SamplingParams(min_tokens=2, stop_token_ids=[9], ignore_eos=ignore_eos)
    for num_output, masked in ((0, True), (1, True), (2, False), (3, False)):
        row = make_row(params, [1, 2, 3], [5] * num_output, eos=(0, 7))
        after = edited(torch.zeros(1, V), [row])[0]
        expected = [0, 7, 9] if masked else []
        assert torch.isinf(after).nonzero().flatten().tolist() == expected


def test_eos_ids_outside_the_logits_are_left_alone():
    """A tokenizer may know more ids than the checkpoint has logits."""
    row = make_row(SamplingParams(min_tokens=2), [1], eos=(V + 4, 2))
    assert torch.isinf(edited(torch.zeros(2, V), [row, row])).nonzero().tolist() == [[0, 2], [1, 2]]


@pytest.mark.parametrize(
    ("words", "output", "banned"),
    [
        ([[5]], [], [5]),
        ([[5]], [1, 2], [5]),
        ([[1, 2]], [], []),
        ([[1, 2]], [1], [2]),
        ([[1, 2]], [1, 3], []),
        ([[1, 2, 3]], [2], []),
        ([[1, 2, 3]], [1, 2], [3]),
        ([[1, 2, 3], [2, 4], [6]], [9, 1, 2], [3, 4, 6]),
    ],
)
def test_bad_words(words, output, banned):
    assert banned_tokens(words, np.array(output, dtype=np.int32)) == banned


def test_bad_words_match_the_output_only():
    row = make_row(SamplingParams(bad_words_ids=[[1, 2]]), prompt=[1], output=[])
    assert torch.isfinite(edited(torch.zeros(1, V), [row])).all()


def test_extreme_biases_stay_finite_or_ban():
    row = make_row(SamplingParams(logit_bias={0: float("inf"), 1: 1e300, 2: -1e300, 3: float("-inf"), 4: float("nan")}))
    after = edited(torch.ones(1, V), [row])[0]
    assert torch.isfinite(after[:2]).all()
    assert (after[:2] > 1e29).all()
    assert after[2:4].tolist() == [-float("inf")] * 2
    assert after[4] == 1.0


def test_edits_leave_the_callers_logits():
    logits = random_logits(1)
    before = logits.clone()
    edited(logits, [make_row(SamplingParams(logit_bias={1: 3.0}))])
    assert torch.equal(logits, before)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.lists(st.integers(0, 200), max_size=150),
    st.lists(st.integers(0, 150), max_size=6),
    st.booleans(),
)
def test_token_counts_grown_in_steps_equal_a_count_from_scratch(prompt, output, stops, with_prompt):
    tokens = np.array(prompt + output, dtype=np.int32)
    counts = TokenCounts(tokens[: len(prompt)], with_prompt=with_prompt)
    for stop in [*sorted(min(s, len(output)) for s in stops), len(output)]:
        counts.update(tokens, len(prompt) + stop)
        seen = dict(zip(counts.ids[: counts.size].tolist(), counts.counts[: counts.size].tolist()))
        expected = dict.fromkeys(prompt, 0) if with_prompt else {}
        expected |= {t: output[:stop].count(t) for t in output[:stop]}
        assert seen == expected


def test_token_counts_hold_any_number_of_distinct_tokens():
    tokens = np.arange(1000, dtype=np.int32)
    counts = TokenCounts(tokens[:3], with_prompt=True)
    for position in range(3, 1001):
        counts.update(tokens, position)
    assert counts.ids[: counts.size].tolist() == list(range(1000))
    assert counts.counts[: counts.size].tolist() == [0.0] * 3 + [1.0] * 997


def test_a_slot_filled_again_forgets_its_counts():
    table = SamplingTable(2, V)
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    tokens = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)
    table.set_row(1, params, 0, [], 1)
    table.select([1], [3], tokens)
    table.set_row(1, params, 0, [], 2)
    tokens[1] = [7, 8, 9]
    after = edit_logits(torch.zeros(1, V), table.select([1], [3], tokens))[0]
    assert after.nonzero().flatten().tolist() == [9]
