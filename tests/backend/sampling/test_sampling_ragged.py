from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.sampling.rules.ragged import RaggedRows, flatten_ranges

ROWS = 5


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, 90)), max_size=60),
    st.lists(st.integers(0, ROWS - 1), max_size=8),
)
def test_rows_replaced_any_number_of_times_equal_a_list_of_lists(changes, asked):
    rows = RaggedRows(ROWS, np.int64, np.float32)
    expected: list[list[int]] = [[] for _ in range(ROWS)]
    for number, (row, size) in enumerate(changes):
        expected[row] = list(range(100 * number, 100 * number + size))
        ids = np.array(expected[row], dtype=np.int64)
        rows.set(row, ids, ids / 2)
        places, owners = rows.places(np.array(asked, dtype=np.int64))
        ids, halves = (column[places] for column in rows.columns)
        assert ids.tolist() == [id for row in asked for id in expected[row]]
        assert (halves * 2).tolist() == ids.tolist()
        assert owners.tolist() == [i for i, row in enumerate(asked) for _ in expected[row]]
        latest = sorted(range(ROWS), key=lambda row: rows.starts[row])
        in_order = [id for row in latest for id in expected[row]]
        assert in_order == sorted(in_order), "rows lie in the order in which they were set"


def test_storage_is_bounded_by_what_is_kept():
    rows = RaggedRows(3, np.int64)
    for number in range(1000):
        rows.set(number % 3, np.arange(200))
    assert len(rows.columns[0]) <= 2 * 600


def test_flatten_ranges():
    values, ranges = flatten_ranges(np.array([10, 7, 3]), np.array([2, 0, 3]))
    assert values.tolist() == [10, 11, 3, 4, 5]
    assert ranges.tolist() == [0, 0, 2, 2, 2]
    assert flatten_ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64))[0].tolist() == []
