"""Errors as Anthropic's API reports them."""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from inflight_gateway.errors import APIError
from inflight_gateway.sse import encode_json

__all__ = ["NO_THREADS", "REQUEST_ID", "anthropic_error", "error_value"]

REQUEST_ID = "request-id"  # Anthropic's header; its library shows it in exceptions

# With this code in the details, the package `anthropic` sends the request again without `thread`.
NO_THREADS = "thread_unsupported_request"

# The backend's messages.
_TOO_LONG = re.compile(r"the prompt has ([1-9]\d*) tokens: it must be 1 to (\d+) long")
_FAR_TOO_LONG = re.compile(r"the prompt has \d+ characters, which must be more than")

# https://platform.claude.com/docs/en/api/errors
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_error(error: APIError, scope: Scope) -> Response:
    """The response for an error; 503 becomes 529, the status of Anthropic's API for a server that cannot take more."""
    status = _status(error)
    headers = {**error.headers, REQUEST_ID: scope["request_id"]}
    return Response(encode_json(error_value(error, scope["request_id"])), status, headers, "application/json")


def error_value(error: APIError, request_id: str) -> dict[str, Any]:
    """The JSON object of a response, or of an event in a stream."""
    status = _status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    shown: dict[str, Any] = {"type": kind, "message": _message(error.message)}
    if error.code == NO_THREADS:
        shown["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    return {"type": "error", "error": shown, "request_id": request_id}


def _message(message: str) -> str:
    """Claude Code shortens the conversation if a message begins with these words of Anthropic's."""
    if found := _TOO_LONG.match(message):
        return f"prompt is too long: {found[1]} tokens > {found[2]} maximum; {message}"
    return f"prompt is too long; {message}" if _FAR_TOO_LONG.match(message) else message


def _status(error: APIError) -> int:
    return 529 if error.status == 503 else error.status
