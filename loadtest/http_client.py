"""Plain HTTP with server-sent events, on a connection for each request."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from loadtest.errors import LoadTestError
from loadtest.exchange import Failure, TimedClient, unreachable

__all__ = ["HttpClient", "HttpFailure"]

_PROBE_SECONDS = 5.0
_SILENT_SECONDS = 600.0  # without a byte of an answer


class HttpFailure(Failure):
    """The server answered with `status`."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"HTTP {status}", detail)
        self.status = status


class HttpClient(TimedClient):
    """One POST per request, server-sent events back, each on a connection of its own.

    Args:
        address: `host:port` or a URL; paths of requests are appended to its path.
        model: name on the server.
    """

    def __init__(self, address: str, model: str) -> None:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        try:
            known = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            known = False
        if not known:
            raise LoadTestError(f"address {address!r}: give host:port, or a URL such as http://127.0.0.1:9000/v1")
        self._secure, self._netloc, self._base = parts.scheme == "https", parts.netloc, parts.path.rstrip("/")
        self._address, self._model = address, model

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._netloc.rpartition("@")[2], timeout=seconds)

    def _headers(self) -> dict[str, str]:
        return {}

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of a short request before the load: a POST if there is a body."""
        connection = self._connect(_PROBE_SECONDS)
        headers = {"Content-Type": "application/json", **self._headers()} if body is not None else self._headers()
        try:
            method = "GET" if body is None else "POST"
            connection.request(method, self._base + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self._address, "HTTP", str(error) or type(error).__name__) from None
        finally:
            connection.close()

    def _events(self, path: str, body: dict[str, Any], needs_done: bool = False) -> Iterator[dict[str, Any]]:
        """The JSON objects of the answer's events.

        Args:
            needs_done: whether a complete stream ends with `[DONE]`.

        Raises:
            Failure: refused, interrupted, or an event with an error.
        """
        connection = self._connect(_SILENT_SECONDS)
        try:
            headers = {"Content-Type": "application/json", **self._headers()}
            connection.request("POST", self._base + path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise HttpFailure(response.status, response.read().decode(errors="replace").strip())
            while line := response.readline():
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data:"):
                    yield _event(line[5:])
            if needs_done:
                raise Failure("the stream ended without [DONE]")
        except ConnectionRefusedError:
            raise Failure("connection refused", self._netloc) from None
        except TimeoutError:
            raise Failure(f"silent for {_SILENT_SECONDS:g} s", self._netloc) from None
        except (OSError, http.client.HTTPException) as error:
            raise Failure("connection failed", f"{type(error).__name__}: {error}") from None
        finally:
            connection.close()


def _event(text: bytes) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise Failure("an event is not a JSON object", text.decode(errors="replace").strip())
    if event.get("error"):
        error = event["error"]
        raise Failure("an error in the stream", str(error.get("message", error) if isinstance(error, dict) else error))
    return event
