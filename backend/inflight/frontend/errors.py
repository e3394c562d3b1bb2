"""The one error a request can be answered with."""

from __future__ import annotations

from typing import Literal

__all__ = ["ErrorCode", "RequestError"]

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
