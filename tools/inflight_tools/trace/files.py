"""Step traces from a server or a file, to a file in one of the formats."""

from __future__ import annotations

from pathlib import Path

import httpx2
import msgspec

from inflight.engine.step_trace import Trace, TraceError
from inflight_client.connection import Connection
from inflight_tools.trace.html import timeline_html
from inflight_tools.trace.perfetto import perfetto_trace
from inflight_tools.trace.timeline import build_timeline

__all__ = ["FORMATS", "TraceServerError", "fetch_trace", "format_of", "read_trace", "render"]

FORMATS = ("html", "perfetto", "json")
_SUFFIXES = {".html": "html", ".htm": "html", ".pftrace": "perfetto", ".perfetto": "perfetto", ".json": "json"}


class TraceServerError(RuntimeError):
    """The server has no trace for us; the message says why and what to do.

    Attributes:
        status: exit status of the command: 2 when no server answered, else 1.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def fetch_trace(url: str, model: str, timeout: float = 60.0) -> Trace:
    """Ask a running server for a model's step trace.

    Args:
        url: `host:port` of Triton's HTTP endpoint, or `http(s)://` before it.

    Raises:
        TraceServerError: no server there, no such model, or `step_trace` is off.
        ValueError: a `url` that is none.
    """
    connection = Connection.build(url, "http", {})
    base = connection.base_url
    try:
        with httpx2.Client(timeout=timeout, trust_env=not connection.is_loopback) as client:
            answer = client.post(f"{base}/v2/models/{model}/generate", json={"control": "step_trace"})
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise TraceServerError(f"no answer from {base}: {error}; give Triton's HTTP address with --url", 2) from None
    try:
        body = answer.json()
    except ValueError:
        body = {}
    if answer.status_code != 200 or "text_output" not in body:
        raise TraceServerError(str(body.get("error", f"{base} answered {answer.status_code}: {answer.text[:200]}")))
    return Trace.from_json(body["text_output"])


def read_trace(path: Path) -> Trace:
    """Raises TraceError (no step trace) or OSError."""
    try:
        return Trace.from_json(path.read_bytes())
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def format_of(path: Path) -> str:
    """The format that a file's name asks for; raises ValueError when it does not say."""
    if path.name.endswith((".perfetto.json", ".trace.json")):
        return "perfetto"
    try:
        return _SUFFIXES[path.suffix]
    except KeyError:
        raise ValueError(f"{path.name!r} does not say the format: give --format {'|'.join(FORMATS)}") from None


def render(trace: Trace, format: str, title: str | None = None) -> bytes:
    """The content of the file; `format` is one of `FORMATS`."""
    if format == "json":
        return trace.to_json()
    timeline = build_timeline(trace)
    if format == "html":
        return timeline_html(timeline, title).encode("utf-8")
    return msgspec.json.encode(perfetto_trace(timeline))
