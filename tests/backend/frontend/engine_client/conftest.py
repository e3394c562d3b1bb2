"""A place where stubs meet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_engine_rig import Place, sockets, wait_for


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for group in place.groups:
        group.leave()
    wait_for(lambda: not place.processes())
    wait_for(lambda: not sockets(place.name))
