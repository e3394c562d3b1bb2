"""What a request can fail with, and how a server's words become one of these.

Triton drops the error code of a response on a gRPC stream and of every response but the first over
HTTP: what is left is the message.  `triton_grpc_error: true` would bring gRPC codes, but with it
tritonserver 24.10 loses responses that were queued before the error and can abort when several
streams fail at once, so this client does not ask for it and reads the message (`code_of_message`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inflight_client.results import GenerationResult

__all__ = [
    "DeadlineExceededError",
    "InflightError",
    "InvalidRequestError",
    "RequestCancelledError",
    "ServerError",
    "ServerUnreachableError",
    "UnavailableError",
    "code_of_message",
    "error_for",
]


class InflightError(Exception):
    """A request that did not end well.

    Attributes:
        message: as the server said it.
        code: name of the gRPC status, such as "UNAVAILABLE".
        request_id: which request; "" where there was none.
        partial: what had arrived before the error; None when nothing had.
    """

    code = "UNKNOWN"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.request_id = ""
        self.partial: GenerationResult | None = None


class InvalidRequestError(InflightError):
    """The request itself is wrong: a value out of range, a prompt too long, no such model."""

    code = "INVALID_ARGUMENT"


class UnavailableError(InflightError):
    """The server cannot take the request now: queue full, model loading, engine restarting."""

    code = "UNAVAILABLE"


class ServerUnreachableError(UnavailableError):
    """No server answered at the address, or the connection broke."""


class DeadlineExceededError(InflightError):
    """The request's timeout ran out; what had arrived is in `partial`."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelledError(InflightError):
    """The request was cancelled, here or by the server."""

    code = "CANCELLED"


class ServerError(InflightError):
    """The server failed, or answered against the wire contract."""

    code = "INTERNAL"


_CLASSES: dict[str, type[InflightError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "NOT_FOUND": InvalidRequestError,
    "UNIMPLEMENTED": InvalidRequestError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "CANCELLED": RequestCancelledError,
}

# First match wins: "deadline exceeded" before "cancelled", which is the code Triton has for it.
_MESSAGES: tuple[tuple[str, str], ...] = (
    ("DEADLINE_EXCEEDED", r"deadline (was |has been )?exceeded|timed out|request timeout expired"),
    ("CANCELLED", r"\brequest (was|has been) cancell?ed\b"),
    (
        "UNAVAILABLE",
        r"queue is full|exceeds maximum queue size|being restarted|cannot be restarted|being unloaded"
        r"|no available versions|is not ready|not yet ready|temporarily unavailable|shutting down|try again later"
        r"|server is stopping|stopped accepting",
    ),
    ("NOT_FOUND", r"unknown model: .* is not found"),
    ("INTERNAL", r"^\w*(Error|Exception): |internal error|stub process .* is not healthy|trace cannot be sent"),
    (
        "INVALID_ARGUMENT",
        r"allowed (is|are)\b|\bexpected\b|not valid|out of range|not in the vocabulary|not allowed|not supported"
        r"|not enabled|more than|at least|at most|never fits|is off: set|already exists"
        r"|give (exactly )?one|unexpected inference input|\bmust be\b"
        r"|unable to parse|can not convert|unknown (key|(sampling )?parameter)|^messages: ",
    ),
)
_PATTERNS = tuple((code, re.compile(pattern, re.IGNORECASE)) for code, pattern in _MESSAGES)


def code_of_message(message: str, default: str = "UNKNOWN") -> str:
    """The status a server's error message speaks of; `default` when it says nothing known."""
    return next((code for code, pattern in _PATTERNS if pattern.search(message)), default)


def error_for(code: str, message: str) -> InflightError:
    """The exception of a status name; codes without a class of their own are `ServerError`."""
    return _CLASSES.get(code, ServerError)(message, code=code)
