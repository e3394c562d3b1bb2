"""The exceptions of a failed request, and how a server's message selects one of them.

Triton drops the error codes of responses on a gRPC stream, and over HTTP those of all responses after
the first: only the message remains.  `triton_grpc_error: true` would add gRPC codes, but with it
tritonserver 24.10 loses responses queued before the error and can abort when several streams fail at
once.  This client therefore reads the message instead (`code_of_message`).
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
    "retry_after",
]


class InflightError(Exception):
    """A request failed.

    Attributes:
        message: the server's message.
        code: name of the gRPC status, such as "UNAVAILABLE".
        request_id: the failed request; "" if there was none.
        partial: the output that arrived before the error; None if there was none.
    """

    code = "UNKNOWN"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.request_id = ""
        self.partial: GenerationResult | None = None


class InvalidRequestError(InflightError):
    """The request is invalid: a value out of range, a prompt that is too long, no such model."""

    code = "INVALID_ARGUMENT"


class UnavailableError(InflightError):
    """The server cannot accept the request now: full queue, model loading, engine restarting, draining.

    Attributes:
        retry_after: seconds after which the server allows another attempt; None if it does not say.
    """

    code = "UNAVAILABLE"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after(message)


class ServerUnreachableError(UnavailableError):
    """No server answered at the address, or the connection broke."""


class DeadlineExceededError(InflightError):
    """The request's timeout expired; `partial` has the output that arrived before."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelledError(InflightError):
    """The request was cancelled, here or by the server."""

    code = "CANCELLED"


class ServerError(InflightError):
    """The server failed, or its answer violates the wire contract."""

    code = "INTERNAL"


_CLASSES: dict[str, type[InflightError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "NOT_FOUND": InvalidRequestError,
    "UNIMPLEMENTED": InvalidRequestError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "CANCELLED": RequestCancelledError,
}

# The first match wins: "deadline exceeded" comes before "cancelled", Triton's code for it.
_MESSAGES: tuple[tuple[str, str], ...] = (
    ("DEADLINE_EXCEEDED", r"deadline (was |has been )?exceeded|timed out|request timeout expired"),
    ("CANCELLED", r"\brequest (was|has been) cancell?ed\b"),
    (
        "UNAVAILABLE",
        r"queue is full|exceeds maximum queue size|being restarted|cannot be restarted|being unloaded"
        r"|no available versions|is not ready|not yet ready|temporarily unavailable|shutting down|try again later"
        r"|server is stopping|stopped accepting|unhealthy engine|server exiting|is draining|; retry in [0-9.]+ s$"
        r"|stub process .* is not healthy|engine did not load it within",
    ),
    ("NOT_FOUND", r"unknown model: .* is not found"),
    (
        "INTERNAL",
        r"^(inputs\[\d+\]: )?\w*(Error|Exception): |internal error|trace cannot be sent"
        r"|(logits|vector) .* not finite",
    ),
    (
        "INVALID_ARGUMENT",
        r"allowed (is|are)\b|\bexpected\b|not valid|out of range|not in the vocabulary|not allowed|not supported"
        r"|not enabled|more than|at least|at most|never fits|is off: set|already exists"
        r"|give (exactly )?one|unexpected inference input|\bmust be\b"
        r"|unable to parse|can not convert|unknown (key|(sampling )?parameter)|^messages: "
        r"|not a task of|does not support|(only|not) for task|leave it out|cannot be cut|takes? no(ne| instruction)\b"
        r"|leaves no room|^adapter '|^lora_(name|path)[:=]|lora adapter '.*' (cannot be found|has already been loaded)"
        r"|is missing: |give both, or|omit one|: add it$|needs the seed|nothing is left to generate|output up to that"
        r"|or a JSON list of lists|as an input; got|the request parameter admin_key|no admin key|must come once"
        r"|cannot be continued|leave \w+ out|has no tokenizer|; got '|^control='",
    ),
)
_RETRY_AFTER = re.compile(r"; retry in ([0-9]+(?:\.[0-9]+)?) s$")
_PATTERNS = tuple((code, re.compile(pattern, re.IGNORECASE)) for code, pattern in _MESSAGES)


def code_of_message(message: str, default: str = "UNKNOWN") -> str:
    """The status that an error message of the server implies; `default` for an unknown message."""
    return next((code for code, pattern in _PATTERNS if pattern.search(message)), default)


def retry_after(message: str) -> float | None:
    """Seconds after which another attempt can succeed, according to the message; None if it does not say."""
    found = _RETRY_AFTER.search(message)
    return float(found[1]) if found else None


def error_for(code: str, message: str) -> InflightError:
    """The exception for a status name; `ServerError` for other codes."""
    return _CLASSES.get(code, ServerError)(message, code=code)
