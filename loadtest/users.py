"""Locust users and what they share: the source of requests, and the reports to Locust.

Locust's statistics have, by prompt class, the latency of each request (type `grpc`, `sse` or `openai`; its size
is the number of output tokens), `TTFT`, `TPOT`, and each gap between responses as `ITL`.  An error counts once,
under the request's type.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any, ClassVar, TextIO

import gevent
from locust import User, task
from locust.env import Environment
from locust.stats import CSV_STATS_INTERVAL_SEC

from inflight_tools.workload.scenarios import Job
from loadtest.exchange import Exchange, LoadClient
from loadtest.options import LoadOptions

__all__ = ["EndpointUser", "GrpcUser", "OpenAIUser", "RequestFeed", "SseUser", "StreamingUser"]

_PREPARED = 512  # prompts generated before the load starts; the rest are generated on demand
_IDLE_SECONDS = 0.2
_FAILED_SECONDS = 0.5  # before a user's next request: a server that refuses at once is not asked in a loop


class RequestFeed:
    """Hands out the requests of a run one by one and writes its record.

    Args:
        record: JSON lines file to append to, with the start of the load and one object per request; None for no record.
    """

    def __init__(self, options: LoadOptions, environment: Environment, record: Path | None) -> None:
        self.options, self.environment = options, environment
        self._prompts = options.prompts()
        self._record: TextIO | None = record.open("a", encoding="utf-8", buffering=1) if record else None
        self._jobs = options.jobs()
        self._ready: list[tuple[Job, list[int] | str]] = []
        self._open = self._sent = 0
        self._ended = False
        self.begun = time.time()

    def start(self) -> None:
        """Start over at the first request; Locust calls it for every test that it starts."""
        self._jobs = self.options.jobs()
        # Generating a prompt during the load would delay other users.
        ahead = list(itertools.islice(self._jobs, _PREPARED))
        self._ready = [(job, self._prompts.make(job)) for job in reversed(ahead)]
        self._open, self._sent, self._ended, self.begun = 0, 0, False, time.time()
        self._write({"begun": self.begun})

    def close(self) -> None:
        """Record how many requests were sent; those without a row never ended."""
        self._write({"sent": self._sent})

    def take(self) -> tuple[Job, list[int] | str] | None:
        """The next request and its prompt; None if there are no more."""
        if self._ready:
            return self._ready.pop()
        job = next(self._jobs, None)
        return None if job is None else (job, self._prompts.make(job))

    def run(self, user: StreamingUser, job: Job, prompt: list[int] | str) -> bool:
        """Send a request and report its outcome to Locust and to the record; returns whether it was answered."""
        self._open += 1
        self._sent += 1
        try:
            exchange = user.endpoint.send(prompt, job.output_tokens, job.adapter)
        finally:
            self._open -= 1
        self._tell_locust(user.request_type, job, exchange)
        self._write(
            {
                "index": job.index,
                "kind": job.kind,
                "adapter": job.adapter,
                "prompt_tokens": job.prompt_tokens,
                "output_tokens": job.output_tokens,
                "due": job.due,
                "start": round(exchange.start - self.begun, 4),
                "latency": round(exchange.latency, 4),
                "arrivals": [(round(at, 4), count) for at, count in exchange.arrivals],
                "error": exchange.error,
                "failure": exchange.failure,
                "counted": exchange.counted,
                "ended_early": exchange.ended_early,
            }
        )
        return exchange.error is None

    def wait_for_end(self) -> None:
        """Called when no request is left: ends the test once the last open request has ended."""
        while self._open and not self._ended:
            gevent.sleep(_IDLE_SECONDS)
        runner = self.environment.runner
        if not self._ended and runner is not None:
            self._ended = True
            # Streams are still closing, and Locust's CSV writer does not flush at the end.
            gevent.sleep(1.5 * CSV_STATS_INTERVAL_SEC)
            # In a greenlet of its own, since ending the test ends the user that called this.
            gevent.spawn(runner.stop if self.environment.web_ui else runner.quit)
        gevent.sleep(_IDLE_SECONDS)

    def _tell_locust(self, request_type: str, job: Job, exchange: Exchange) -> None:
        def fire(kind: str, seconds: float, length: int = 0, exception: Exception | None = None) -> None:
            self.environment.events.request.fire(
                request_type=kind,
                name=job.kind,
                response_time=seconds * 1e3,
                response_length=length,
                exception=exception,
                context={},
            )

        failure = None if exchange.error is None else RuntimeError(exchange.error)
        fire(request_type, exchange.latency, exchange.tokens, failure)
        if failure is None:
            for kind, seconds in (("TTFT", exchange.ttft), ("TPOT", exchange.tpot)):
                if seconds is not None:
                    fire(kind, seconds)
            for gap in exchange.itl:
                fire("ITL", gap)

    def _write(self, row: dict[str, Any]) -> None:
        if self._record is not None:
            self._record.write(json.dumps(row) + "\n")


class StreamingUser(User):
    """In a closed loop a user sends a request when its last one has ended; in an open loop, when it is due.

    Attributes:
        kind: what the users speak; "" if the endpoint decides.
        request_type: in Locust's statistics.
        endpoint: shared by all users: a waiting gRPC channel occupies one of gevent's ten native threads, so with a
            channel per user the eleventh would wait for the others.
    """

    abstract = True
    kind: ClassVar[str]
    request_type: ClassVar[str]
    feed: ClassVar[RequestFeed]
    endpoint: ClassVar[LoadClient]

    @task
    def request(self) -> None:
        taken = self.feed.take()
        if taken is None:
            self.feed.wait_for_end()
            return
        job, prompt = taken
        if job.due is not None:
            gevent.sleep(max(0.0, self.feed.begun + job.due - time.time()))
            gevent.spawn(self.feed.run, self, job, prompt)
        elif not self.feed.run(self, job, prompt):
            gevent.sleep(_FAILED_SECONDS)


class EndpointUser(StreamingUser):
    """The protocol that the host speaks, or that the option `--kind` names."""

    kind = ""


class GrpcUser(StreamingUser):
    """gRPC streaming; `--host HOST:8001`."""

    kind = "grpc"


class SseUser(StreamingUser):
    """`/generate_stream`, server-sent events; `--host http://HOST:8000`."""

    kind = "http"


class OpenAIUser(StreamingUser):
    """Completions or chats of an API like OpenAI's; `--host http://HOST:9000`."""

    kind = "openai"
