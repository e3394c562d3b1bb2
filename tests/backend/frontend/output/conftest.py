"""Output processors whose engine the test plays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from output_rig import Rig, Slow


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.streams.stop("test over")


@pytest.fixture
def paced() -> Iterator[Rig]:
    rig = Rig(pacing=Slow())
    yield rig
    rig.streams.stop("test over")
