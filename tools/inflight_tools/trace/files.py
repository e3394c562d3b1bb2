"""Step traces: fetched from a server or read from a file, rendered in one of the formats."""

from __future__ import annotations

from pathlib import Path

import msgspec

from inflight.engine.step_trace import Trace, TraceError
from inflight_client.client import Client
from inflight_client.command_client import sole_model
from inflight_client.endpoint import find_endpoint
from inflight_client.errors import InflightError, ServerUnreachableError
from inflight_client.local_servers import key_of
from inflight_tools.trace.html import timeline_html
from inflight_tools.trace.perfetto import perfetto_trace
from inflight_tools.trace.timeline import build_timeline

__all__ = ["FORMATS", "TraceServerError", "fetch_trace", "format_of", "read_trace", "render"]

FORMATS = ("html", "perfetto", "json")
_SUFFIXES = {".html": "html", ".htm": "html", ".pftrace": "perfetto", ".perfetto": "perfetto", ".json": "json"}


class TraceServerError(RuntimeError):
    """The server gave no trace; the message says why and what to do.

    Attributes:
        status: exit status of the command: 2 if no server answered, else 1.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def fetch_trace(url: str, model: str | None, timeout: float = 60.0, admin_key: str | None = None) -> Trace:
    """Ask a running server for a model's step trace.

    Args:
        url: gRPC or HTTP address of Triton, with or without a scheme.
        model: None: the only one of the server.
        timeout: seconds to wait for the trace.
        admin_key: the server's, if it has one; None: that of a server which this user runs on this machine.

    Raises:
        TraceServerError: no server there, no such model, or `step_trace` is off.
        TraceError: the answer is not a step trace.
        ValueError: `url` is not an address.
    """
    try:
        protocol, url = find_endpoint(url)
        with Client(url, protocol=protocol) as client:
            key = admin_key or key_of(url)
            asked = model or sole_model(url, protocol, key)
            return Trace.from_json(client.control("step_trace", asked, timeout, key))
    except ServerUnreachableError as error:
        raise TraceServerError(error.message, 2) from None
    except InflightError as error:
        raise TraceServerError(error.message) from None


def read_trace(path: Path) -> Trace:
    """Read a trace that `inflight trace -o FILE.json` wrote.

    Raises:
        TraceError: not a step trace.
        OSError: the file cannot be read.
    """
    try:
        return Trace.from_json(path.read_bytes())
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def format_of(path: Path) -> str:
    """The format that a file name implies.

    Raises:
        ValueError: it implies none.
    """
    if path.name.endswith((".perfetto.json", ".trace.json")):
        return "perfetto"
    try:
        return _SUFFIXES[path.suffix]
    except KeyError:
        raise ValueError(f"{path.name!r} does not imply a format; give --format {'|'.join(FORMATS)}") from None


def render(trace: Trace, format: str, title: str | None = None) -> bytes:
    """The contents of the file; `format` is one of `FORMATS`."""
    if format == "json":
        return trace.to_json()
    timeline = build_timeline(trace)
    if format == "html":
        return timeline_html(timeline, title).encode("utf-8")
    return msgspec.json.encode(perfetto_trace(timeline))
