"""The error that a request can end with."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["ErrorCode", "RequestError", "refusal_of", "shown"]

_SHOWN_CHARS = 100

# Names of `pb_utils.TritonError` codes.  Triton 24.10 has none for a missed deadline: that is CANCELLED.
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


def refusal_of(error: RequestError) -> str:
    """How a request ends that is refused with this error, in the words of the metrics (`ENDINGS`)."""
    return {"INVALID_ARG": "invalid", "UNSUPPORTED": "invalid", "UNAVAILABLE": "refused"}.get(error.code, "failed")


def shown(value: Any) -> str:
    """A value as a message quotes it: its `repr`, cut short if long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
