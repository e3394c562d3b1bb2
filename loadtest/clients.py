"""The clients that send and time requests, by what a server speaks.

All of them work with and without gevent's monkey patching.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from inflight_client.endpoint import find_endpoint
from inflight_client.errors import ServerUnreachableError
from loadtest.errors import LoadTestError
from loadtest.exchange import Exchange, LoadClient
from loadtest.http_client import HttpClient
from loadtest.openai_client import OpenAIClient
from loadtest.triton_clients import GrpcClient, SseClient

__all__ = ["KINDS", "Exchange", "LoadClient", "connect", "find_kind"]

KINDS = ("grpc", "http", "openai")


def connect(
    kind: str, address: str, model: str, api_key: str | None = None, traits: dict[str, Any] | None = None
) -> GrpcClient | SseClient | OpenAIClient:
    """A client for Triton's "grpc" or "http", or for an API like OpenAI's ("openai"); it connects on first use.

    Args:
        api_key: for "openai"; None reads the environment variable OPENAI_API_KEY.
        traits: those of a client whose `check` has passed.
    """
    if kind == "grpc":
        return GrpcClient(address, model, traits)
    if kind == "http":
        return SseClient(address, model, traits)
    return OpenAIClient(address, model, api_key, traits)


def find_kind(url: str, kind: str = "") -> tuple[str, str]:
    """Ask the server what it speaks, unless `kind` says so.

    Returns:
        The kind, and the address for `connect`.

    Raises:
        LoadTestError: `url` is no address, nothing answers there, or there is no such kind.
    """
    if kind and kind not in KINDS:
        raise LoadTestError(f"--kind {kind!r}: must be one of {', '.join(KINDS)}")
    if kind:
        return kind, url
    scheme, _, rest = url.rpartition("://")
    if scheme in ("", "http", "https") and ("/" in rest.rstrip("/") or _has_models(url)):
        return "openai", url
    try:
        return find_endpoint(url)
    except ServerUnreachableError as error:
        raise LoadTestError(f"{error.message}; start a server there or correct --url") from None
    except ValueError as error:
        raise LoadTestError(str(error)) from None


class _Probe(HttpClient):
    """Asks for the models of an API like OpenAI's."""

    def has_models(self) -> bool:
        try:
            status, answer = self._ask("/v1/models")
            return status in (401, 403) or (status == 200 and isinstance(json.loads(answer)["data"], list))
        except (LoadTestError, ValueError, KeyError, TypeError):
            return False


def _has_models(url: str) -> bool:
    return bool(urlsplit(url if "://" in url else f"http://{url}").netloc) and _Probe(url, "").has_models()
