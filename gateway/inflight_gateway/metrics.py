"""The gateway's metrics, for Prometheus at `/metrics`.

With several worker processes each writes its numbers to files that all share (`prometheus_client.multiprocess`); any of
them adds them up.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from starlette.requests import Request
from starlette.responses import Response

__all__ = ["SHARED_FOLDER", "Metrics", "metrics"]

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # environment variable of prometheus_client

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """The metrics of one process.

    Attributes:
        open_requests: requests that are generating, in this process.
    """

    def __init__(self) -> None:
        folder = os.environ.get(SHARED_FOLDER)
        self.registry = CollectorRegistry()
        self._shared = Path(folder) if folder else None
        # Values in files are read from there, not from a registry.
        own = None if folder else self.registry
        if folder:
            MultiProcessCollector(self.registry, folder)  # type: ignore[no-untyped-call]
        self.open_requests = 0
        self._open = Gauge(
            "inflight_gateway_open_requests",
            "Requests that generate now.",
            registry=own,
            multiprocess_mode="livesum",
        )
        self._requests = Counter(
            "inflight_gateway_requests",
            "Requests that have ended, by endpoint and HTTP status; 499: the client hung up.",
            ["endpoint", "status"],
            registry=own,
        )
        self._seconds = Histogram(
            "inflight_gateway_request_seconds",
            "From a request's headers to the end of its answer.",
            ["endpoint"],
            registry=own,
            buckets=_SECONDS,
        )
        self._first_token = Histogram(
            "inflight_gateway_time_to_first_token_seconds",
            "From a request's headers to the first output of its stream.",
            ["endpoint"],
            registry=own,
            buckets=_SECONDS,
        )
        self._chunks = Counter("inflight_gateway_chunks", "Chunks of Triton's passed on in streams.", registry=own)
        self._broken = Counter(
            "inflight_gateway_broken_streams", "Streams that ended with an error event.", registry=own
        )
        self._warnings = Counter(
            "inflight_gateway_warnings",
            "Warnings in the headers of responses, by endpoint and reason.",
            ["endpoint", "reason"],
            registry=own,
        )
        self._routed = Counter(
            "inflight_gateway_routed_requests",
            "Requests given to a Triton, by the reason for it.",
            ["triton", "why"],
            registry=own,
        )
        self._resumed = Counter(
            "inflight_gateway_resumed_streams",
            "Times that another attempt went on behind the output of a stream that was interrupted.",
            registry=own,
        )
        self._handovers = Counter(
            "inflight_gateway_handovers",
            "Requests whose prompt a Triton for prompts was to compute, by outcome.",
            ["outcome"],
            registry=own,
        )
        self._handover_gap = Histogram(
            "inflight_gateway_handover_gap_seconds",
            "From the first token of a Triton for prompts to the next one of the Triton that goes on, in streams.",
            registry=own,
            buckets=_SECONDS,
        )
        # Children are found once: `labels` costs as much as the rest of a count.
        self._first_token_of = functools.cache(self._first_token.labels)
        self._requests_of = functools.cache(self._requests.labels)
        self._seconds_of = functools.cache(self._seconds.labels)
        self.sent = self._chunks.inc
        self.resumed = self._resumed.inc
        self.broke = self._broken.inc
        self.continued_after = self._handover_gap.observe

    def opened(self) -> None:
        """A request begins to generate."""
        self.open_requests += 1
        self._open.inc()

    def closed(self) -> None:
        """A request that was opened has ended."""
        self.open_requests -= 1
        self._open.dec()

    def all_open_requests(self) -> int:
        """The open requests of all worker processes."""
        if self._shared is None:
            return self.open_requests
        self._forget_dead_processes(self._shared)
        return int(self.registry.get_sample_value("inflight_gateway_open_requests") or 0)

    def routed(self, triton: str, why: str) -> None:
        """A Triton was chosen for an attempt."""
        self._routed.labels(triton, why).inc()

    def handed_over(self, outcome: str) -> None:
        """A Triton for prompts has done its part, or another one does all of it."""
        self._handovers.labels(outcome).inc()

    def warned(self, endpoint: str, reason: str, count: int) -> None:
        """A response has so many warnings."""
        self._warnings.labels(endpoint, reason).inc(count)

    def began(self, endpoint: str, seconds: float) -> None:
        """A stream begins: its first output has arrived."""
        self._first_token_of(endpoint).observe(seconds)

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """An HTTP request has ended."""
        self._requests_of(endpoint, str(status)).inc()
        self._seconds_of(endpoint).observe(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        if self._shared is not None:
            self._forget_dead_processes(self._shared)
        return generate_latest(self.registry)

    @staticmethod
    def _forget_dead_processes(folder: Path) -> None:
        for path in folder.glob("gauge_livesum_*.db"):
            found = re.fullmatch(r"gauge_livesum_(\d+)\.db", path.name)
            if found and not Path(f"/proc/{found[1]}").exists():
                mark_process_dead(int(found[1]), str(folder))  # type: ignore[no-untyped-call]


async def metrics(http: Request) -> Response:
    """`/metrics`: the gateway's, and Triton's if the operator named them.

    503 if those cannot be read: without them a server would pass for one without load.
    """
    gateway = http.app.state.gateway
    text: bytes = gateway.metrics.text()
    if gateway.triton_metrics is not None:
        text += await gateway.triton_metrics.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)
