"""Streams of an output processor whose engine the test plays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from frontend_rig import RecordingClient, RecordingStats, demo_tokenizer, make_request, step_message

from inflight.engine.deltas import RequestFailed, SequenceDelta, StepStats
from inflight.engine.messages import AddRequest
from inflight.frontend.errors import RequestError
from inflight.frontend.output.output_processor import OutputProcessor
from inflight.frontend.output.pacing import Pacing

__all__ = ["IDS", "PROMPT", "STATS", "TEXT", "TOKENIZER", "Postman", "Rig", "Slow", "postmen", "wait_for"]

TOKENIZER = demo_tokenizer()
STATS = StepStats(1, 0, 0, 1, 9, 0, 0, 1, 1, 1, 0.001)
TEXT = " the list of names"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False)
PROMPT = TOKENIZER.encode("Return")


class EngineStub:
    """Records the calls of the streams; the test plays the engine."""

    def __init__(self) -> None:
        self.submitted: dict[int, AddRequest] = {}
        self.aborted: list[tuple[int, int | None]] = []
        self.released: list[int] = []
        self.resubmitted: list[AddRequest] = []
        self.holds_new = False
        self.refuse: RequestError | None = None

    def submit(self, request: AddRequest) -> None:
        if self.refuse:
            raise self.refuse
        self.submitted[request.request_id] = request

    def abort(self, request_id: int, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    def resubmit(self, requests: Iterable[AddRequest], hold_new: bool = False, settled: bool = True) -> None:
        self.resubmitted += requests
        self.holds_new = hold_new

    def recall(self, emptied: Callable[[], None]) -> set[int]:
        raise NotImplementedError

    def release(self, request_id: int) -> None:
        self.released.append(request_id)

    def ask(self, question: Any) -> Future[Any]:
        raise NotImplementedError


class Rig:
    """An output processor and its engine; `options` are those of `OutputProcessor`."""

    def __init__(self, **options: Any) -> None:
        self.engine = EngineStub()
        self.stats = RecordingStats()
        self.errors: list[str] = []
        self.lines: list[str] = []
        options |= {"log_info": self.lines.append}
        options.setdefault("check_seconds", 0.01)
        self.streams = OutputProcessor(TOKENIZER, self.engine, self.stats, self.errors.append, **options)
        self.streams.start()

    def open(self, *returns: str, stream: bool = True, **options: Any) -> RecordingClient:
        client = RecordingClient()
        prepend_text = "" if stream else "Return"
        request = make_request(PROMPT, returns=returns, stream=stream, prepend_text=prepend_text, **options)
        self.streams.open(request, client)
        return client

    def step(self, *deltas: SequenceDelta, failed: Sequence[RequestFailed] = ()) -> None:
        self.streams.on_step(step_message(deltas, STATS, failed=list(failed)))

    def settle(self) -> None:
        """Wait until the sender has handled all that came so far."""
        handled = threading.Event()
        self.streams._events.put(self.streams._catch_up)
        self.streams._events.put(handled.set)
        assert handled.wait(60)

    def feed(self, ids: list[int], finish: str | None = "length", request_id: int = 1) -> None:
        for position, token in enumerate(ids):
            last = position == len(ids) - 1
            self.step(SequenceDelta(request_id, 0, [token], finish if last else None))


def wait_for(condition: Callable[[], Any]) -> None:
    """Raises AssertionError: `condition` is not true within a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.002)


class Slow(Pacing):
    """As if sending were costly: a response of each stream every 50 ms."""

    def __init__(self) -> None:
        super().__init__(1)
        self.wait = 0.05

    def step(self, num_streams: int) -> None: ...


class Postman(RecordingClient):
    """A client whose responses are made at one time and sent at another; `log` has both, of all of them."""

    log: list[tuple[str, int]]
    number: int
    lost = False

    def prepare(self, outputs: dict[str, Any], final: bool) -> Callable[[], None]:
        self.log.append(("made", self.number))
        return super().prepare(outputs, final)

    def send(self, outputs: dict[str, Any], final: bool) -> None:
        self.log.append(("sent", self.number))
        if self.lost:
            raise RuntimeError("cannot reach the client")
        super().send(outputs, final)

    def fail(self, code: str, message: str) -> None:
        self.log.append(("failed", self.number))
        super().fail(code, message)


def postmen(rig: Rig, count: int) -> tuple[list[Postman], list[tuple[str, int]]]:
    """`count` clients with a stream each, and their common log."""
    log: list[tuple[str, int]] = []
    clients = [Postman() for _ in range(count)]
    for number, client in enumerate(clients, 1):
        client.log, client.number = log, number
        rig.streams.open(make_request(PROMPT, returns=["return_token_ids"], max_tokens=40), client)
    rig.settle()
    return clients, log
