"""Middleware for every request: checks the host and the API key, counts the answer, and answers after a fault."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Collection, Mapping
from types import MappingProxyType

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight_gateway.errors import APIError, ErrorForm, api_error, error_response
from inflight_gateway.hosts import AllowedHosts
from inflight_gateway.metrics import Metrics
from inflight_gateway.response_headers import warnings_of

__all__ = ["Front", "Keys"]

_OPEN_PATHS = frozenset(
    {"/", "/api/version", "/health", "/health/ready", "/ping", "/ready", "/version"}
)  # answered without a key
# Load balancers call these by a name of their own: Envoy by the name of its cluster.  They tell nothing.
_PROBES = frozenset({"/health", "/health/ready", "/ping", "/ready"})


class Keys:
    """The accepted API keys; without any, every request is accepted.

    Comparing takes as long for a wrong key as for a right one.
    """

    def __init__(self, keys: Collection[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def accept(self, headers: Headers) -> bool:
        """Whether the header `Authorization`, or `x-api-key` of Anthropic's clients, has one of them."""
        if not self._digests:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        bearer = key if scheme.lower() == "bearer" else ""
        found = [self._has(key) for key in (bearer, headers.get("x-api-key", ""))]
        return any(found)

    def _has(self, key: str) -> bool:
        # Header values are latin-1; a key was read as UTF-8.
        given = _digest(key.strip().encode("latin-1", "replace"))
        found = [hmac.compare_digest(given, one) for one in self._digests]
        return any(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Front:
    """ASGI middleware.

    Args:
        app: the wrapped application.
        keys: accepted API keys.
        hosts: accepted names of this server.
        metrics: count answers.
        paths: paths with a label of their own in the metrics.
        open_paths: further paths that need no key.
        error_forms: forms of errors other than OpenAI's, by path.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        hosts: AllowedHosts,
        metrics: Metrics,
        paths: Collection[str],
        open_paths: Collection[str] = (),
        error_forms: Mapping[str, ErrorForm] = MappingProxyType({}),
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._keys = keys
        self._metrics = metrics
        self._paths = frozenset(paths)
        self._open_paths = _OPEN_PATHS.union(open_paths)
        self._error_forms = error_forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started, since = 500, False, time.perf_counter()
        if (form := self._error_forms.get(self._endpoint(scope))) is not None:
            scope["error_form"] = form

        async def sending(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                for reason, count in warnings_of(scope).counts.items():
                    self._metrics.warned(self._endpoint(scope), reason, count)
                if scope.get("has_output"):
                    self._metrics.began(self._endpoint(scope), time.perf_counter() - since)
            await send(message)

        try:
            try:
                self._check(Headers(scope=scope), scope["path"])
            except APIError as error:
                await error_response(error, scope)(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        except Exception as error:
            if not started:  # here, so that the response has the headers of the outer middleware
                await error_response(api_error(error), scope)(scope, receive, sending)
            raise  # the server logs it
        finally:
            if scope.get("client_gone"):
                status = 499
            self._metrics.answered(self._endpoint(scope), status, time.perf_counter() - since)

    def _check(self, headers: Headers, path: str) -> None:
        if path not in _PROBES:
            self._hosts.check(headers.get("host", ""))
        if path not in self._open_paths and not self._keys.accept(headers):
            raise _no_key()

    def _endpoint(self, scope: Scope) -> str:
        path: str = scope["path"]
        if path in self._paths:
            return path
        return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"


def _no_key() -> APIError:
    message = "an API key is expected: the header 'Authorization: Bearer KEY', with a key of this gateway"
    return APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
