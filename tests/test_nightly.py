"""Parametrisations that `make test` runs a part of."""

from __future__ import annotations

from typing import Any

import pytest
from nightly import nightly_but


def test_what_is_not_kept_is_marked() -> None:
    unhashable: list[Any] = [{"a": 1}, {"a": 2}]
    kept, other = nightly_but([{"a": 1}], iter(unhashable))
    assert kept is unhashable[0]
    assert other.values == ({"a": 2},) and [mark.name for mark in other.marks] == ["nightly"]


def test_a_value_that_is_kept_and_does_not_exist_is_an_error() -> None:
    """Else a value that is renamed runs no more without a word."""
    with pytest.raises(AssertionError, match=r"not among the values: \['lama'\]"):
        nightly_but(["llama", "lama"], ["llama", "qwen3"])
