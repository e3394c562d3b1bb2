"""Rows of different lengths in flat arrays, so that numpy can read many rows at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["RaggedRows", "flatten_ranges"]


class RaggedRows:
    """Per slot a row of any length, made of parallel columns.

    Rows are appended to the flat columns in the order in which they are set.  A row that is
    replaced leaves a gap; gaps are closed, in order, when there is no room left.

    Attributes:
        columns: one flat array per dtype; entries past `end` and in gaps are void.
        end: entries in use, gaps included.
        starts, sizes: int64[num_rows], where each row lies in the columns.
    """

    def __init__(self, num_rows: int, *dtypes: npt.DTypeLike) -> None:
        self.columns = [np.empty(64, dtype=dtype) for dtype in dtypes]
        self.end = 0
        self.starts = np.zeros(num_rows, dtype=np.int64)
        self.sizes = np.zeros(num_rows, dtype=np.int64)

    def set(self, row: int, *values: np.ndarray) -> None:
        """Replace a row; one array per column, all of the same length."""
        size = len(values[0])
        self.sizes[row] = 0
        if self.end + size > len(self.columns[0]):
            self._make_room(size)
        for column, part in zip(self.columns, values, strict=True):
            column[self.end : self.end + size] = part
        self.starts[row], self.sizes[row] = self.end, size
        self.end += size

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the entries of `rows` lie in the columns, and which of `rows` each belongs to."""
        return flatten_ranges(self.starts[rows], self.sizes[rows])

    def _make_room(self, size: int) -> None:
        """Close the gaps, and leave at least as much room as there is content."""
        by_place = np.argsort(self.starts, kind="stable")
        kept, _ = self.places(by_place)
        capacity = max(len(self.columns[0]), 2 * (len(kept) + size))
        for i, column in enumerate(self.columns):
            self.columns[i] = np.empty(capacity, dtype=column.dtype)
            self.columns[i][: len(kept)] = column[kept]
        sizes = self.sizes[by_place]
        self.starts[by_place] = np.cumsum(sizes) - sizes
        self.end = len(kept)


def flatten_ranges(starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All integers of the ranges [starts[i], starts[i] + sizes[i]) in turn, and the i of each; int64."""
    ranges = np.repeat(np.arange(len(sizes)), sizes)
    firsts = np.cumsum(sizes) - sizes
    return np.arange(len(ranges)) + (starts - firsts)[ranges], ranges
