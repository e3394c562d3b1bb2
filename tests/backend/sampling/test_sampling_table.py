from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_tables import new_table

from inflight.engine.sampling_params import SamplingParams
from inflight.sampling import Sampler, SamplingMetadata, SamplingTable
from inflight.sampling.metadata import COLUMN_LINES, Kind

GREEDY = SamplingParams(temperature=0.0)


def test_plain_greedy_rows_need_nothing():
    table = new_table(4, 10)
    for slot in range(4):
        # top_k, top_p and min_p never change the argmax
        table.set_row(slot, SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1), 1, [2], 1)
    metadata = table.select([3, 1], [5, 6])
    assert metadata == SamplingMetadata.all_greedy(2)
    logits = torch.randn(2, 10)
    assert torch.equal(Sampler()(logits, metadata).token_ids, logits.argmax(-1))


def test_a_slot_filled_again_holds_only_the_new_request():
    table = new_table(1, 10)
    busy = SamplingParams(
        top_k=3, top_p=0.5, logit_bias={1: 1.0}, min_tokens=2, bad_words_ids=[[1]], presence_penalty=1.0, logprobs=2
    )
    table.set_row(0, busy, 1, [2], 1)
    assert len(table.select([0], [2], np.ones((1, 4), dtype=np.int32)).edits) == 4
    table.set_row(0, GREEDY, 1, [2], 1)
    assert table.select([0], [2]) == SamplingMetadata.all_greedy(1)


def test_a_greedy_request_in_a_formerly_random_slot_is_greedy_beside_random_ones():
    table = new_table(2, 1000)
    table.set_row(0, SamplingParams(), 1, [], 1)
    table.set_row(1, SamplingParams(), 2, [], 1)
    table.set_row(0, GREEDY, 1, [], 1)
    logits = torch.zeros(2, 1000)
    tokens = [Sampler()(logits, table.select([0, 1], [p, p])).token_ids.tolist() for p in range(1, 9)]
    assert {greedy for greedy, _ in tokens} == {0}
    assert len({random for _, random in tokens}) > 4


def test_rows_are_grouped_by_how_they_are_drawn_where_no_kernel_draws_them():
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


@pytest.mark.parametrize("kind", [GREEDY, SamplingParams(top_k=3, temperature=0.5)])
def test_columns_that_the_caller_uploads_stand_for_padding_too(kind):
    """A captured step has as many rows as its bucket; only the first belong to slots."""
    table, alone = new_table(4, 10), new_table(4, 10)
    for slot in range(4):
        for each in (table, alone):
            each.set_row(slot, kind, slot, [], 1)
    room = np.zeros((COLUMN_LINES, 5), dtype=np.int64)
    slots, positions = np.array([3, 1]), np.array([7, 2])
    table.fill_columns(room, slots, positions)
    assert room[6].tolist() == [Kind.TOP_K if kind.top_k else Kind.GREEDY] * 2 + [Kind.PADDING] * 3
    columns = torch.from_numpy(room)
    metadata = table.select(slots, positions, columns=columns)
    assert metadata.columns is columns
    logits = torch.randn(5, 10)
    got = Sampler()(logits, metadata).token_ids
    assert len(got) == metadata.num_rows == 5
    assert torch.equal(got[:2], Sampler()(logits[:2], alone.select(slots, positions)).token_ids)


def test_tokens_are_not_read_for_rows_that_do_not_need_them():
    table = new_table(2, 10)
    table.set_row(0, SamplingParams(top_k=2, min_tokens=3, logit_bias={1: 2.0}, logprobs=1), 0, [1], 1)
    table.set_row(1, GREEDY, 0, [1], 1)
    assert len(table.select([0, 1], [2, 2], None).edits) == 2


@pytest.mark.parametrize(
    ("params", "rule"), [({"bad_words_ids": [[1, 2]]}, "BadWords"), ({"frequency_penalty": 0.1}, "Penalties")]
)
def test_missing_tokens_are_reported(params, rule):
    table = new_table(1, 10)
    table.set_row(0, SamplingParams(**params), 0, [], 1)
    with pytest.raises(ValueError, match=f"token_ids is None, but {rule} reads the tokens of its rows"):
        table.select([0], [3])


@pytest.mark.parametrize("token", [10, -1])
@pytest.mark.parametrize("name", ["logit_bias", "bad_words_ids"])
def test_token_ids_outside_the_logits_are_rejected(name, token):
    """Flat indices would reach into another row."""
    params = SamplingParams(**{name: {token: 1.0} if name == "logit_bias" else [[1], [1, token]]})
    with pytest.raises(ValueError, match=rf"{name}: token id {token} is not in the vocabulary \[0, 9\]"):
        new_table(1, 10).set_row(0, params, 0, [], 1)


def test_a_rejected_request_leaves_no_row_behind():
    table = new_table(1, 10)
    table.set_row(0, SamplingParams(logit_bias={1: 9.0}), 0, [], 1)
    with pytest.raises(ValueError, match="logit_bias"):
        table.set_row(0, SamplingParams(logit_bias={10: 1.0}), 0, [], 1)
    assert table.select([0], [1]) == SamplingMetadata.all_greedy(1)


def test_parameters_are_not_validated_again():
    """The frontend and the engine have done so; the table takes them as they are."""
    new_table(1, 10).set_row(0, SamplingParams(min_tokens=9, max_tokens=1, top_p=2.0), 0, [], 1)


def test_logits_of_another_shape_are_rejected():
    table = new_table(2, 10)
    table.set_row(0, SamplingParams(), 0, [], 1)
    for shape in ((3, 10), (1, 11)):
        with pytest.raises(ValueError, match=r"logits have shape \[., 1.\], metadata is for \[1, 10\]"):
            Sampler()(torch.zeros(shape), table.select([0], [1]))


def test_no_rows():
    output = Sampler()(torch.zeros(0, 10), new_table(2, 10).select([], []))
    assert output.token_ids.shape == (0,)
    assert len(output.logprobs) == 0
