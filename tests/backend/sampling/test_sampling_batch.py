"""A row's token depends on that row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logprobs_of import logprobs_of
from sampling_tables import describe, new_table

from inflight.engine.sampling_params import SamplingParams
from inflight.sampling import Sampler, SampleRow

pytestmark = pytest.mark.usefixtures("drawn_by")

sample = Sampler()
V = 1013
SHAPES: list[dict] = [{}, {"top_p": 0.9}, {"top_k": 30}, {"min_p": 0.1}]

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 5, 40, 64, 65, 500, V, 2 * V]),
    top_p=st.sampled_from([1.0, 0.97, 0.8, 0.31, 1e-4]),
    min_p=st.sampled_from([0.0, 0.0, 0.003, 0.13]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3]),
    allowed_token_ids=st.none() | st.lists(st.integers(0, V - 1), min_size=5, max_size=40, unique=True),
    logit_bias=st.none() | st.dictionaries(st.integers(0, V - 1), st.floats(-8, 8, width=32), max_size=4),
    bad_words_ids=st.sampled_from([[], [], [[3], [1, 2]]]),
    min_tokens=st.sampled_from([0, 4]),
    logprobs=st.sampled_from([None, None, 0, 3]),
)
row_strategy = st.tuples(params_strategy, st.integers(0, 2**64 - 1), st.integers(0, 9), st.integers(0, 2**31))


def make_rows(drawn) -> list[SampleRow]:
    rows = []
    for params, seed, num_output, history_seed in drawn:
        tokens = np.random.default_rng(history_seed).integers(0, V, 12 + num_output).astype(np.int32)
        rows.append(SampleRow(params, seed, len(tokens), tokens[:12], tokens[12:], (5,)))
    return rows


def make_logits(num_rows: int, dtype: torch.dtype, scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(num_rows, V, generator=torch.Generator().manual_seed(num_rows)) * scale).to(dtype)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(row_strategy, min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0.2, 3.0]),
    st.randoms(use_true_random=False),
)
def test_mixed_batch_equals_each_row_alone_and_any_order(reference, drawn, dtype, scale, random):
    rows, logits = make_rows(drawn), make_logits(len(drawn), dtype, scale)
    batch = sample(logits, describe(rows, V))
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], describe([row], V))
        assert alone.token_ids.tolist() == [batch.token_ids[i]]
        assert logprobs_of(alone).get(0) == logprobs_of(batch).get(i)
        assert batch.token_ids[i] == reference.token(logits[i].float().numpy(), row)
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = sample(logits[order], describe([rows[i] for i in order], V))
    assert shuffled.token_ids.tolist() == batch.token_ids[order].tolist()


def test_seeded_request_in_a_batch_of_64_and_another_slot():
    params = SamplingParams(temperature=0.9, top_p=0.95)
    logits = make_logits(64, torch.float32)
    alone = new_table(1, V)
    alone.set_row(0, params, 1234, [], 3)
    crowd = new_table(64, V)
    for slot in range(64):
        crowd.set_row(slot, SamplingParams(top_k=slot, temperature=1 + slot / 64), slot, [], 3)
    crowd.set_row(41, params, 1234, [], 3)
    slots = np.random.default_rng(0).permutation(64)
    row = int(np.flatnonzero(slots == 41)[0])
    for position in range(3, 40):
        expected = sample(logits[row : row + 1], alone.select([0], [position])).token_ids[0]
        assert sample(logits, crowd.select(slots, np.full(64, position))).token_ids[row] == expected


def test_same_token_at_the_same_position_and_others_elsewhere():
    table = new_table(1, V)
    table.set_row(0, SamplingParams(), 7, [], 1)
    logits = make_logits(1, torch.float32, 0.1)
    first = [int(sample(logits, table.select([0], [p])).token_ids) for p in range(1, 50)]
    assert [int(sample(logits, table.select([0], [p])).token_ids) for p in range(1, 50)] == first
    assert len(set(first)) > 40


@pytest.mark.parametrize("size", [1009, 32003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_batch_equals_each_row_alone(size, dtype):
    """More rows than one chunk holds, and a vocabulary that is no multiple of a vector width."""
    shapes = [{}, {"top_p": 0.9}, {"top_k": 30}, {"min_p": 0.1}, {"temperature": 0.0}, {"top_k": 200, "top_p": 0.5}]
    logits = (torch.randn(18, size, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    table = new_table(18, size)
    for slot in range(18):
        table.set_row(slot, SamplingParams(**shapes[slot % 6]), slot, [], 1)
    together = sample(logits, table.select(range(18), [5] * 18)).token_ids
    for slot in range(18):
        assert sample(logits[slot : slot + 1], table.select([slot], [5])).token_ids[0] == together[slot]


def test_short_nucleus_beside_a_long_one():
    """Rows of a shortlist are padded; here padding would be drawn if it counted."""
    logits = torch.full((2, V), -20.0)
    logits[0, :4] = torch.tensor([1.0, 0.5, 0.0, -0.5])
    logits[1, 100:400] = 0.0
    table = new_table(2, V)
    for slot in range(2):
        table.set_row(slot, SamplingParams(top_p=0.9), slot, [], 1)
    tokens = set()
    for position in range(200):
        together = sample(logits, table.select([0, 1], [position] * 2)).token_ids
        assert sample(logits[:1], table.select([0], [position])).token_ids[0] == together[0]
        tokens.add(int(together[0]))
    assert tokens == {0, 1, 2, 3}


def test_bfloat16_equals_float32_of_the_same_values():
    logits = make_logits(6, torch.bfloat16)
    table = new_table(6, V)
    for slot, shape in enumerate(
        [{}, {"top_p": 0.9}, {"top_k": 30}, {"min_p": 0.1}, {"temperature": 0.0}, {"top_k": 3}]
    ):
        table.set_row(slot, SamplingParams(**shape), slot, [], 1)
    metadata = table.select(range(6), [9] * 6)
    assert torch.equal(sample(logits, metadata).token_ids, sample(logits.float(), metadata).token_ids)


def test_sampler_leaves_the_callers_logits():
    rows = make_rows(
        [(SamplingParams(**shape), 1, 2, 3) for shape in ({}, {"top_p": 0.5}, {"top_k": 9}, {"min_p": 0.2})]
    )
    logits = make_logits(4, torch.float32)
    before = logits.clone()
    sample(logits, describe(rows, V))
    assert torch.equal(logits, before)


def test_logits_from_a_larger_buffer_and_from_inference_mode():
    """Runners pass views: padded rows, padded vocabularies, inference tensors."""
    with torch.inference_mode():
        buffer = torch.randn(8, V + 11, generator=torch.Generator().manual_seed(0))
    logits = buffer[2:6, :V]
    rows = make_rows(
        [(SamplingParams(**shape), 1, 2, 3) for shape in ({}, {"top_p": 0.5}, {"top_k": 9}, {"logprobs": 2})]
    )
    metadata = describe(rows, V)
    plain = sample(logits.clone().contiguous(), metadata)
    output = sample(logits, metadata)
    assert torch.equal(output.token_ids, plain.token_ids)
    assert output.logprobs == plain.logprobs
