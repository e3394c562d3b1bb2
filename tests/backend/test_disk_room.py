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
    set_disk(total, free, tmp_path, monkeypatch)
    assert (lacks_room(tmp_path, size) is None) == enough


def test_sizes_have_units_that_fit_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_disk(2**26, 2**21, tmp_path, monkeypatch)
    why = f"600 B would leave less than 3.20 MiB of the disk at {tmp_path} free"
    assert lacks_room(tmp_path, 600) == why


def set_disk(total: int, free: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = os.statvfs_result((4096, 4096, total // 4096, free // 4096, free // 4096, *os.statvfs(folder)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
