"""Errors as OpenAI's API reports them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from inflight_client import (
    DeadlineExceededError,
    InflightError,
    InvalidRequestError,
    RequestCancelledError,
    ServerUnreachableError,
    UnavailableError,
)

__all__ = [
    "APIError",
    "ErrorForm",
    "api_error",
    "error_response",
    "invalid",
    "model_not_found",
    "openai_error",
    "request_error",
]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


_MAX_LISTED = 100  # models in an error
_MAX_SHOWN = 200  # characters of a name

# Refusals because of too much load; other ones mean that the server cannot work.
_OVERLOADED = re.compile(r"queue\b.* is full|queue is too long|exceeds maximum queue size|wait to be tokenised")
# The backend's words, and vllm_backend's, for an adapter that it does not have.
_NO_ADAPTER = re.compile(r"LoRA .* is not supported, we currently support ", re.DOTALL)
# The backend's messages begin with its name of the invalid key.
_NAMED = re.compile(r"([a-z][a-z_]*)(?:=|: )")
_PARAMS = {"input_ids": "prompt", "text_input": "prompt", "request_priority": "priority"}


class APIError(Exception):
    """A request that fails, with the HTTP status and the fields of OpenAI's error object.

    Args:
        status: HTTP status.
        message: the value, what is allowed, how to fix it.
        param: the invalid key of the body.
        code: a word for programs.
        type: default: derived from the status.
        retry_after: seconds; becomes the header `Retry-After`.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type or _TYPES.get(status, "server_error")
        self.retry_after = retry_after
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def again(self) -> APIError:
        """An equal error that was not raised: one that was holds the frames that it passed, with all their objects."""
        return APIError(
            self.status,
            self.message,
            param=self.param,
            code=self.code,
            type=self.type,
            retry_after=self.retry_after,
            headers=self.headers,
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of a response, or of an event in a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_json(self) -> bytes:
        return msgspec.json.encode(self.to_dict())


# The response for an error in the form of an API other than OpenAI's; the scope is that of the request.
ErrorForm = Callable[[APIError, Scope], Response]


def error_response(error: APIError, scope: Scope) -> Response:
    """The response of a request that fails before anything was sent, in the form of its path's API."""
    form: ErrorForm = scope.get("error_form", openai_error)
    return form(error, scope)


def openai_error(error: APIError, scope: Scope) -> Response:
    """An error in OpenAI's form."""
    return Response(error.to_json(), error.status, error.headers, "application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """An error of the caller: 400."""
    return APIError(400, message, param=param, code=code)


def model_not_found(model: str, known: Iterable[str], count: int) -> APIError:
    """404; the message lists the first of `count` available models."""
    listed = ", ".join(islice(known, _MAX_LISTED)) or "none"
    if count > _MAX_LISTED:
        listed += f" and {count - _MAX_LISTED} more"
    message = f"The model {model[:_MAX_SHOWN]!r} does not exist; models here: {listed}"
    return APIError(404, message, param="model", code="model_not_found")


def api_error(error: BaseException) -> APIError:
    """The caller's view of any exception, such as one of the client library."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, InflightError):
        return _of_client(error)
    return APIError(500, "internal error of the gateway; see its log", code="internal_error")


def request_error(error: Exception) -> APIError:
    """As `api_error`, and for the exceptions of the client library's own checks of a request."""
    return _named(str(error)) if isinstance(error, (ValueError, TypeError)) else api_error(error)


def _of_client(error: InflightError) -> APIError:
    if isinstance(error, ServerUnreachableError):
        return APIError(503, error.message, code="upstream_unreachable", retry_after=1.0)
    if isinstance(error, UnavailableError):
        if _OVERLOADED.search(error.message):
            return APIError(429, error.message, code="queue_full", retry_after=error.retry_after or 1.0)
        return APIError(503, error.message, code="unavailable", retry_after=error.retry_after or 1.0)
    if isinstance(error, DeadlineExceededError):
        return APIError(504, error.message, type="timeout_error", code="timeout")
    if isinstance(error, RequestCancelledError):
        return APIError(503, error.message, code="cancelled", retry_after=1.0)
    if error.code == "NOT_FOUND":
        return APIError(404, error.message, param="model", code="model_not_found")
    if isinstance(error, InvalidRequestError) and _NO_ADAPTER.match(error.message):
        return APIError(404, error.message, param="model", code="model_not_found")
    if isinstance(error, InvalidRequestError):
        return _named(error.message)
    return APIError(500, error.message, code="upstream_error")


def _named(message: str) -> APIError:
    """400, with the key that the message begins with."""
    named = _NAMED.match(message)
    return invalid(message, _PARAMS.get(named[1], named[1]) if named else None)
