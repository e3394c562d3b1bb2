"""Counters of a gateway process.  Plain numbers: nothing is looked up per chunk."""

from __future__ import annotations

__all__ = ["Metrics"]


class Metrics:
    """What `/metrics` shows.

    Attributes:
        open_requests: requests that generate now.
        chunks: chunks of text sent in streams.
        broken_streams: streams that ended with an error event.
    """

    def __init__(self) -> None:
        self.open_requests = 0
        self.chunks = 0
        self.broken_streams = 0
