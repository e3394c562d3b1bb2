"""Whatever happens to a stored extent: it is loaded as it was, or not at all, and then it is removed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from extents import blank, content, frames_of, key
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.tiers.seal import SEAL_BYTES, Seal
from inflight.engine.tiers.tier import Tier
from inflight.runner.stores.directory import DirectoryStore
from inflight.runner.tier_threads import TierThreads

SIZE = 5000
NAMESPACE, OTHER = bytes(range(16)), bytes(range(16, 32))


class Kept:
    """A tier on a disk, and the file of one extent."""

    def __init__(self, folder: Path, secret: bytes = b"", namespace: bytes = NAMESPACE) -> None:
        self.store = DirectoryStore(folder, namespace.hex(), 2**30)
        self.tier = Tier("disk", self.store, Seal(namespace, secret), TierThreads)

    def write(self, number: int) -> Path:
        data = content(number, SIZE)
        self.tier._write(key(number), lambda: frames_of(data))
        return Path(self.store._file(key(number)))

    def is_right(self, number: int) -> bool:
        memory, frames = blank(SIZE)
        loaded = self.tier.load(key(number), lambda read: read(frames)).result(60)
        assert not loaded or memory == content(number, SIZE)
        return loaded


@pytest.fixture(scope="module", params=[b"", b"a secret of all engines"], ids=["plain", "signed"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept(tmp_path_factory.mktemp("kept"), request.param)


def _flip(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _flip_seal(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(SEAL_BYTES)] ^= 1 << draw.randrange(8)


def _zero(data: bytearray, draw: random.Random) -> None:
    """A part that never reached the disk."""
    start = draw.randrange(len(data))
    data[start:] = bytes(len(data) - start)


def _move(data: bytearray, draw: random.Random) -> None:
    """Two parts that have changed places."""
    cut = draw.randrange(1, len(data))
    data[:] = data[cut:] + data[:cut]


def _cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def _grow(data: bytearray, draw: random.Random) -> None:
    data += bytes(draw.randrange(1, 100))


@pytest.mark.parametrize("change", [_flip, _flip_seal, _zero, _move, _cut, _grow])
@given(seed=st.integers(0, 2**32))
def test_no_changed_file_is_believed(kept: Kept, change: Callable[[bytearray, random.Random], None], seed: int) -> None:
    path = kept.write(1)
    assert kept.is_right(1)
    data = bytearray(path.read_bytes())
    change(data, random.Random(seed))
    path.write_bytes(data)
    assert not kept.is_right(1)
    assert not path.exists()


def test_no_other_extent_is_believed(kept: Kept, tmp_path: Path) -> None:
    """One of another key, another namespace, or signed with another secret, under this name."""
    foreign = [kept.write(2), Kept(tmp_path / "a", namespace=OTHER).write(1), Kept(tmp_path / "b", b"x" * 16).write(1)]
    for path in foreign:
        here = kept.write(1)
        os.replace(path, here)
        assert not kept.is_right(1)
        assert not here.exists()


def test_names_with_a_secret_cannot_be_guessed() -> None:
    names = {Seal(NAMESPACE, secret).key_of(key(1)) for secret in (b"", b"x" * 16, b"y" * 16)}
    assert len(names) == 3
