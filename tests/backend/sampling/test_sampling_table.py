from __future__ import annotations

import numpy as np
import pytest
import torch

from inflight.engine.sampling_params import SamplingParams
from inflight.sampling import Sampler, SamplingMetadata, SamplingTable

GREEDY = SamplingParams(temperature=0.0)


def test_plain_greedy_rows_need_nothing():
    table = SamplingTable(4, 10)
    for slot in range(4):
        # top_k, top_p and min_p never move the argmax
        table.set_row(slot, SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1), 1, [2], 1)
    metadata = table.select([3, 1], [5, 6])
    assert metadata == SamplingMetadata.all_greedy(2)
    logits = torch.randn(2, 10)
    assert torch.equal(Sampler()(logits, metadata).token_ids, logits.argmax(-1))


def test_a_slot_filled_again_holds_only_the_new_request():
    table = SamplingTable(1, 10)
    busy = SamplingParams(
        top_k=3, top_p=0.5, logit_bias={1: 1.0}, min_tokens=2, bad_words_ids=[[1]], presence_penalty=1.0, logprobs=2
    )
    table.set_row(0, busy, 1, [2], 1)
    assert table.select([0], [2], np.ones((1, 4), dtype=np.int32)).edits_logits
    table.set_row(0, GREEDY, 1, [2], 1)
    assert table.select([0], [2]) == SamplingMetadata.all_greedy(1)


def test_a_greedy_request_in_a_slot_that_was_random_is_greedy_beside_random_ones():
    table = SamplingTable(2, 1000)
    table.set_row(0, SamplingParams(), 1, [], 1)
    table.set_row(1, SamplingParams(), 2, [], 1)
    table.set_row(0, GREEDY, 1, [], 1)
    logits = torch.zeros(2, 1000)
    tokens = [Sampler()(logits, table.select([0, 1], [p, p])).token_ids.tolist() for p in range(1, 9)]
    assert {greedy for greedy, _ in tokens} == {0}
    assert len({random for _, random in tokens}) > 4


def test_rows_are_grouped_by_how_they_are_drawn():
    table = SamplingTable(6, 5000)
    for slot, params in enumerate(
        [GREEDY, SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=8), SamplingParams(top_k=2000)]
    ):
        table.set_row(slot, params, slot, [], 1)
    table.set_row(5, SamplingParams(top_k=64, min_p=0.1), 5, [], 1)
    metadata = table.select([5, 4, 3, 2, 1, 0], [9] * 6)
    assert metadata.greedy_rows is not None
    assert metadata.greedy_rows.tolist() == [5]
    assert [(g.rows.tolist(), g.max_top_k) for g in metadata.random_groups] == [
        ([4], 0),
        ([3], 0),
        ([0, 2], 64),
        ([1], 2000),
    ]
    assert [g.start for g in metadata.random_groups] == [4, 3, -1, 1]
    assert [g.top_p is None for g in metadata.random_groups] == [True, False, True, True]
    assert [g.min_p is None for g in metadata.random_groups] == [True, True, False, True]


def test_history_is_read_only_for_rows_that_need_it():
    class Unreadable:
        def __getitem__(self, slot: int) -> np.ndarray:
            raise AssertionError(f"slot {slot} was read")

    table = SamplingTable(2, 10)
    table.set_row(0, SamplingParams(top_k=2, min_tokens=3, logit_bias={1: 2.0}, logprobs=1), 0, [1], 1)
    table.set_row(1, GREEDY, 0, [1], 1)
    table.select([0, 1], [2, 2], Unreadable())


def test_missing_history_is_named():
    table = SamplingTable(1, 10)
    for params in (SamplingParams(bad_words_ids=[[1, 2]]), SamplingParams(frequency_penalty=0.1)):
        table.set_row(0, params, 0, [], 1)
        with pytest.raises(ValueError, match="token_ids is None"):
            table.select([0], [3])


@pytest.mark.parametrize("params", [{"logit_bias": {10: 1.0}}, {"bad_words_ids": [[1, 10]]}, {"stop_token_ids": [10]}])
def test_token_ids_outside_the_logits_are_refused(params):
    """Flat indices would reach into the next row."""
    with pytest.raises(ValueError, match="token id 10 is not in the vocabulary"):
        SamplingTable(1, 10).set_row(0, SamplingParams(**params), 0, [], 1)


def test_logits_of_another_number_of_rows_or_tokens_are_refused():
    table = SamplingTable(2, 10)
    table.set_row(0, SamplingParams(), 0, [], 1)
    for shape in ((3, 10), (1, 11)):
        with pytest.raises(ValueError, match=r"logits have shape \[., 1.\], metadata is for \[1, 10\]"):
            Sampler()(torch.zeros(shape), table.select([0], [1]))


def test_no_rows():
    output = Sampler()(torch.zeros(0, 10), SamplingTable(2, 10).select([], []))
    assert output.token_ids.shape == (0,)
    assert output.logprobs == {}
