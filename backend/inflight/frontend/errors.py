"""The error that a request can end with."""

from __future__ import annotations

import math
from typing import Any, Literal

from inflight.engine.deltas import RequestFailed

__all__ = ["ErrorCode", "RequestError", "error_of", "refusal_of", "shown", "with_hint"]

_SHOWN_CHARS = 100

# Names of `pb_utils.TritonError` codes.  Triton 24.10 has none for a missed deadline: that is CANCELLED.
ErrorCode = Literal["INVALID_ARG", "UNAVAILABLE", "INTERNAL", "CANCELLED", "UNSUPPORTED"]


class RequestError(Exception):
    """A request that ends with an error response.

    Attributes:
        code: name of the Triton error code.
        message: the value, what is allowed, how to fix it; with the hint, if there is one.
        retry_after: seconds after which another attempt can succeed; None: unknown.
        ending: how the request ends (`metric_specs.ENDINGS`), if the code does not determine it.
    """

    def __init__(
        self, code: ErrorCode, message: str, retry_after: float | None = None, ending: str | None = None
    ) -> None:
        if retry_after is not None:
            message = with_hint(message, retry_after)
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.retry_after = retry_after
        self.ending = ending


def with_hint(message: str, seconds: float) -> str:
    """The message with a hint when to try again: "...; retry in 2.5 s".

    Triton gives a backend no field for it, so clients read the number from the end of the message.
    """
    if seconds < 10:
        return f"{message}; retry in {max(1, math.ceil(seconds * 10)) / 10:.1f} s"
    return f"{message}; retry in {math.ceil(seconds)} s"


def error_of(failed: RequestFailed) -> RequestError:
    """The error of a request that the engine refused or failed."""
    ending = "shed" if failed.shed else None
    return RequestError(failed.code, failed.message, failed.retry_after, ending)  # type: ignore[arg-type]


def refusal_of(error: RequestError) -> str:
    """The ending (`metric_specs.ENDINGS`) of a request that is refused with this error."""
    by_code = {"INVALID_ARG": "invalid", "UNSUPPORTED": "invalid", "UNAVAILABLE": "refused", "CANCELLED": "cancelled"}
    return error.ending or by_code.get(error.code, "failed")


def shown(value: Any) -> str:
    """A value for a message: its `repr`, truncated if long."""
    try:
        text = repr(value)
    except RecursionError:  # JSON can be read at a depth that is too great for this
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
