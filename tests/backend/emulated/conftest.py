"""An emulated card for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_card import Card, emulated_card


@pytest.fixture
def card() -> Iterator[Card]:
    with emulated_card() as made:
        yield made
