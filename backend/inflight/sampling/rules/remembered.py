"""Remembers what a rule computes from a request's list, so that all of its sequences share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Remembered"]

_Result = TypeVar("_Result")


class Remembered(Generic[_Result]):
    """Calls `make(value)`, but not again for the object of the call before.

    The n sequences of a request have the same list object in their parameters and enter one after another; a list of
    100,000 token ids takes milliseconds to convert, and no step can run meanwhile.  Values must not change.
    """

    def __init__(self, make: Callable[[Any], _Result]) -> None:
        self._make = make
        self._last: tuple[Any, _Result] | None = None

    def __call__(self, value: Any) -> _Result:
        if self._last is None or self._last[0] is not value:
            self._last = value, self._make(value)
        return self._last[1]
