"""The one error a request can be answered with."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["ErrorCode", "RequestError", "shown"]

_MOST_SHOWN = 100

# Names of `pb_utils.TritonError` codes.  Triton 24.10 has none for a deadline: that is CANCELLED.
ErrorCode = Literal["INVALID_ARG", "UNAVAILABLE", "INTERNAL", "CANCELLED", "UNSUPPORTED"]


class RequestError(Exception):
    """A request that ends with an error response.

    Attributes:
        code: name of the Triton error code.
        message: what came, what is allowed, how to fix it.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message


def shown(value: Any) -> str:
    """What came, for a message: `repr`, and of something long its beginning."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
