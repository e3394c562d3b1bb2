"""The clients of a soak: each sends one request after another, over gRPC or HTTP, and judges what comes back."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from inflight_client import AsyncClient
from inflight_client.errors import DeadlineExceededError, InflightError, InvalidRequestError, RequestCancelledError
from inflight_client.stream import AsyncStream
from loadtest.soak.cases import BAD_REQUESTS, Answer, Case, answer_of, matches

__all__ = ["Traffic"]

_END_SECONDS = 60.0  # within which every request must end
_MAX_PROBLEMS = 5  # reported of problems that begin alike; all are counted
_SHED = "the queue is too long for the request's deadline"

# How a client treats its requests, and how often.
_HABITS = {"whole": 60, "slow": 8, "cancel": 16, "deadline": 10, "bad": 6}


class Traffic:
    """Sends requests until it is stopped, or waits while it is paused.

    Args:
        clients: by protocol; they do not retry.
        cases: the requests, with their known answers.
        seed: determines who asks what.

    Attributes:
        counts: requests by how they ended.
        problems: what must not happen, in words.
        num_problems: how many there were.
    """

    def __init__(self, clients: Mapping[str, AsyncClient], cases: Sequence[tuple[Case, Answer]], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.num_problems = 0
        self._clients = clients
        self._cases = cases
        self._rng = random.Random(seed)
        self._running = asyncio.Event()
        self._open = 0
        self._away_until = float("-inf")  # the end of the last time without a model
        self._unloading = False

    # -- events ----------------------------------------------------------------------------

    def model_away(self, seconds: float = float("inf")) -> None:
        """From now on, for so many seconds, a refused request is no problem."""
        self._away_until = time.monotonic() + seconds

    def unloading(self, now: bool) -> None:
        """While a model is being unloaded, no gRPC stream is cancelled: Triton can then keep its instance for good.

        So can an earlier cancellation that races with the end of its stream, which this does not prevent
        (docs/operations/drain-and-reload.md).
        """
        self._unloading = now

    def problem(self, text: str) -> None:
        self.num_problems += 1
        kind = ": ".join(text.split(": ")[:2])
        if sum(known.startswith(kind) for known in self.problems) < _MAX_PROBLEMS:
            self.problems.append(text)

    # -- load ------------------------------------------------------------------------------

    async def run(self, count: int) -> None:
        """`count` clients at a time, until cancelled; they start with `resume`."""
        await asyncio.gather(*(self._client_loop() for _ in range(count)))

    def resume(self) -> None:
        self._running.set()

    async def pause(self) -> None:
        """Send nothing new, and wait until every request has ended."""
        self._running.clear()
        while self._open:
            await asyncio.sleep(0.02)

    async def _client_loop(self) -> None:
        while True:
            await self._running.wait()
            self._open += 1
            try:
                await self._request()
            finally:
                self._open -= 1

    async def _request(self) -> None:
        rng = self._rng
        protocol, habit = rng.choice(list(self._clients)), rng.choices(list(_HABITS), list(_HABITS.values()))[0]
        case, known = rng.choice(self._cases)
        started, about = time.monotonic(), f"{protocol}, {habit}, {case}"
        try:
            await asyncio.wait_for(self._send(protocol, habit, case, known), _END_SECONDS)
        except asyncio.TimeoutError:
            self.problem(f"no end within {_END_SECONDS:g} s: {about}")
            self.counts["without an end"] += 1
        except InflightError as error:
            if error.code in ("UNAVAILABLE", "NOT_FOUND") and started <= self._away_until:
                self.counts["refused while the model was away"] += 1
                if error.partial is not None:
                    self.problem(f"ended in the middle: {error}: {about}")
                await asyncio.sleep(0.2)  # as a client's backoff would
            elif habit == "deadline" and _SHED in str(error) and error.partial is None:
                self.counts["refused because of the deadline"] += 1
            else:
                self.counts["failed"] += 1
                self.problem(f"{type(error).__name__}: {error}: {about}")

    async def _send(self, protocol: str, habit: str, case: Case, known: Answer) -> None:
        if habit == "bad":
            return await self._send_bad(self._clients[protocol], case)
        rng = self._rng
        options = dict(case.options)
        if habit == "deadline":
            options["timeout"] = rng.uniform(0.01, 0.5)
        stream = self._clients[protocol].stream(case.prompt, **options)
        async with stream:
            try:
                cut = await self._read(stream, habit, rng.randint(1, 5), protocol == "grpc")
            except (DeadlineExceededError, RequestCancelledError):
                if habit != "deadline":
                    raise
                cut = "ended by the deadline"
        if not matches(answer_of(stream.result()), known, whole=cut is None):
            self.counts["wrong"] += 1
            self.problem(f"wrong answer: {answer_of(stream.result())} instead of {known}: {case}")
        else:
            self.counts[cut or "right to the last token"] += 1

    async def _read(self, stream: AsyncStream, habit: str, after: int, grpc: bool) -> str | None:
        """Read to the end; returns what else happened."""
        received = 0
        async for _ in stream:
            received += 1
            if received >= after and habit == "cancel" and not (grpc and self._unloading):
                return "cancelled"
            if received <= after and habit == "slow":
                await asyncio.sleep(0.1)
        return None

    async def _send_bad(self, client: AsyncClient, case: Case) -> None:
        options = self._rng.choice(BAD_REQUESTS)
        try:
            await client.generate(case.prompt, **options)
        except InvalidRequestError as error:
            if error.code != "INVALID_ARGUMENT":  # no such model
                raise
            self.counts["refused as invalid"] += 1
        else:
            self.problem(f"a bad request was served: {options}")
