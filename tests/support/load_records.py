"""Records of a load test, as `loadtest.users.RequestFeed` writes them."""

from __future__ import annotations

from typing import Any


def row(index: int, start: float, arrivals: list[tuple[float, int]], kind: str = "short") -> dict[str, Any]:
    """A record of a request, which failed if there are no `arrivals`."""
    tokens = sum(count for _, count in arrivals)
    return {
        "index": index,
        "kind": kind,
        "prompt_tokens": 10,
        "output_tokens": tokens or 5,
        "due": None,
        "start": start,
        "latency": arrivals[-1][0] if arrivals else 1.0,
        "arrivals": arrivals,
        "error": None if arrivals else "connection refused: 127.0.0.1:8001",
        "failure": None if arrivals else "connection refused",
        "counted": "server",
        "ended_early": False,
    }
