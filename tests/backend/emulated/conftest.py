"""These tests use an emulated card, which a process with a real one cannot have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from emulated_card import Card, emulated_card


@pytest.fixture
def card() -> Iterator[Card]:
    if torch.cuda.is_available():
        pytest.skip("there is a real card")
    with emulated_card() as made:
        yield made
