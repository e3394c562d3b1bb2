"""How much of a disk stays free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inflight.disk_room import lacks_room

GIB = 2**30


@pytest.mark.parametrize(
    ("total", "free", "size", "enough"),
    [
        (2000 * GIB, 90 * GIB, GIB, True),  # 4.5% of it, and plenty
        (2000 * GIB, 6 * GIB, GIB, True),
        (2000 * GIB, 6 * GIB, GIB + 4096, False),
        (40 * GIB, 3 * GIB, GIB, True),
        (40 * GIB, 3 * GIB, GIB + 4096, False),
    ],
)
def test_a_twentieth_stays_free_and_no_more_than_5_gib(
    total: int, free: int, size: int, enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = os.statvfs_result((4096, 4096, total // 4096, free // 4096, free // 4096, *os.statvfs(tmp_path)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    assert (lacks_room(tmp_path, size) is None) == enough
