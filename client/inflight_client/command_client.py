"""The client of a command: at the address that the user gave, for the model that was named or is the only one."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import typer

from inflight_client.client import Client
from inflight_client.connection import Protocol
from inflight_client.endpoint import find_endpoints
from inflight_client.errors import InflightError, ServerUnreachableError
from inflight_client.local_servers import admin_headers, key_of

__all__ = ["ADMIN_KEY", "INTERRUPTED", "client_for", "fail", "models_at", "sole_model"]

ADMIN_KEY = "INFLIGHT_ADMIN_KEY"
INTERRUPTED = 130  # the status shells report for a program ended by Ctrl-C

_URLS = {"grpc": "127.0.0.1:8001", "http": "127.0.0.1:8000"}


def client_for(url: str | None, protocol: str | None, model: str | None) -> Client:
    """A client for `model`; None: for the only one of the server.

    Args:
        url: Triton's addresses with commas; None: the default one.
        protocol: None: the one that answers.

    Raises:
        ValueError: wrong options.
        InflightError: no server answers, or its models are unknown, none or several.
    """
    chosen: Any = protocol
    urls: str | list[str] | None = url
    if url is not None and protocol is None:
        chosen, urls = find_endpoints(url)
    chosen = chosen or "grpc"
    return Client(urls, protocol=chosen, model=model or sole_model(urls, chosen))


def sole_model(urls: str | list[str] | None, protocol: Protocol, admin_key: str | None = None) -> str:
    """The only model that is ready.

    Raises:
        InflightError: there is none or several, or the server does not list them; the message says what to do.
    """
    try:
        names = sorted({entry["name"] for entry in models_at(urls, protocol, admin_key) if entry["state"] == "READY"})
    except ServerUnreachableError:
        raise
    except InflightError as error:
        raise InflightError(
            f"name the model with --model: the server lists its models to callers with its admin key only "
            f"({ADMIN_KEY}); it said: {error.message}"
        ) from None
    if len(names) != 1:
        raise InflightError(
            f"name one of the server's models with --model: {', '.join(names)}" if names else "no model is ready"
        )
    return str(names[0])


def models_at(urls: str | list[str] | None, protocol: Protocol, admin_key: str | None = None) -> list[dict[str, Any]]:
    """Models of the server, with the admin key if one is known: `name`, `version`, `state` and `reason`.

    Raises:
        InflightError: no server answers, or it requires another key.
    """
    first = (urls[0] if isinstance(urls, list) else urls) or _URLS.get(protocol, "")
    key = admin_key or os.environ.get(ADMIN_KEY) or key_of(first)
    with Client(urls, protocol=protocol, headers=admin_headers(protocol, key)) as client:
        return [{"version": "", "state": "", "reason": "", **entry} for entry in client.repository_index()]


def fail(message: str, status: int) -> NoReturn:
    typer.echo(f"inflight: {message}", err=True)
    raise typer.Exit(status)
