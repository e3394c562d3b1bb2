"""Sizes of tests that run on a GPU and, in the interpreter, on an emulated card."""

from __future__ import annotations

from typing import TypeVar

from emulated_card import is_emulated

__all__ = ["sized"]

_T = TypeVar("_T")


def sized(real: _T, emulated: _T) -> _T:
    """The one or the other, by the card that there is; at import and in the test alike."""
    return emulated if is_emulated() else real
