"""Long texts are read beside the thread that takes requests, and everybody is answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from frontend_rig import RecordingClient, demo_tokenizer

from inflight.frontend.errors import RequestError, refusal_of
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.tokenize_pool import DIRECT_BYTES, TokenizePool


class Opened:
    """A `OutputProcessor` that records who was opened or rejected, in order."""

    def __init__(self) -> None:
        self.names: list[Any] = []
        self.errors: dict[Any, RequestError] = {}
        self.came = threading.Condition()

    def open(self, request: Any, responder: Any) -> None:
        with self.came:
            self.names.append(request)
            self.came.notify_all()

    def reject(self, responder: Any, error: RequestError) -> None:
        with self.came:
            self.errors[responder.name] = error
            self.came.notify_all()

    def wait(self, *, opened: int = 0, rejected: int = 0) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.names) >= opened and len(self.errors) >= rejected, 20)


class Client(RecordingClient):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Rig:
    """`take` returns at once for a long text; the parser waits for `go` on texts that begin with "wait"."""

    def __init__(self, parse: Callable[[WireRequest], Any] | None = None, **options: Any) -> None:
        self.go = threading.Event()
        self.reading = threading.Semaphore(0)
        self.streams = Opened()
        self.lines: list[str] = []
        self.pool = TokenizePool(parse or self._parse, self.streams, self.lines.append, **options)  # type: ignore[arg-type]
        self.pool.start()

    def _parse(self, wire: WireRequest) -> ParsedRequest:
        if wire.request_id.startswith("wait"):
            self.reading.release()
            assert self.go.wait(20)
        return wire.request_id  # type: ignore[return-value]

    def take(
        self, name: str, num_bytes: int, received: float = 0.0, prompt: str = "text_input", start: bytes = b""
    ) -> Client:
        text = np.array([start + b"x" * num_bytes], dtype=np.object_)
        client = Client(name)
        with self.pool.errors_to(client):
            self.pool.take(WireRequest({prompt: text}, request_id=name, received=received), client)
        return client

    def block(self) -> None:
        """Keep all threads that read texts reading."""
        num_threads = sum(queue is self.pool._texts for queue, _ in self.pool._readers)
        for k in range(num_threads):
            self.take(f"wait {k}", DIRECT_BYTES + 1)
        for _ in range(num_threads):
            assert self.reading.acquire(timeout=20)

    def stop(self) -> None:
        self.go.set()
        self.pool.stop()


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.stop()


def test_a_short_text_passes_long_ones_that_are_being_read(rig: Rig) -> None:
    rig.block()
    rig.take("long", 10 * DIRECT_BYTES)
    rig.take("short", DIRECT_BYTES)
    assert rig.streams.names == ["short"], "opened before `take` returned"
    rig.go.set()
    rig.streams.wait(opened=4)


@pytest.mark.parametrize(
    ("inputs", "parameters"),
    [
        ({}, {"stop_token_ids": f"[{'5,' * 4 * DIRECT_BYTES}5]"}),
        ({"stop_token_ids": np.zeros(4 * DIRECT_BYTES, np.int64)}, {}),
        ({"resume_token_ids": np.zeros(DIRECT_BYTES, np.int64)}, {}),
    ],
    ids=["parameter", "tensor", "output"],
)
def test_long_lists_are_read_by_threads_too(
    rig: Rig, inputs: dict[str, np.ndarray], parameters: dict[str, Any]
) -> None:
    client = Client("list")
    rig.block()
    rig.pool.take(WireRequest(inputs, parameters, request_id="list"), client)
    rig.pool.take(WireRequest({"input_ids": np.zeros(2048, np.int64)}, {"tenant": "a"}, request_id="short"), client)
    assert rig.streams.names == ["short"]
    rig.go.set()
    rig.streams.wait(opened=4)


def test_only_chats_wait_for_a_chat(rig: Rig) -> None:
    """Its template may take seconds, in a process of its own."""
    rig.take("wait", 1, prompt="messages")
    assert rig.reading.acquire(timeout=20)
    rig.take("chat", 1, prompt="messages")
    rig.take("short", 1)
    assert rig.streams.names == ["short"]
    rig.take("long", 10 * DIRECT_BYTES)
    rig.streams.wait(opened=2)
    assert rig.streams.names == ["short", "long"]
    rig.go.set()
    rig.streams.wait(opened=4)
    assert rig.streams.names[2:] == ["wait", "chat"]


@pytest.mark.parametrize("key", [b"chat_template", b"chat\\u005ftemplate", b"\\u0063hat_templat\\u0065"])
def test_chats_with_templates_of_their_own_hold_up_only_each_other(rig: Rig, key: bytes) -> None:
    own = b'{"%s": "{%% for i in range(9999999) %%}' % key
    rig.take("wait", 1, prompt="messages", start=own)
    assert rig.reading.acquire(timeout=20)
    rig.take("another", 1, prompt="messages", start=own)
    rig.take("chat", 1, prompt="messages")
    rig.streams.wait(opened=1)
    assert rig.streams.names == ["chat"]
    rig.go.set()
    rig.streams.wait(opened=3)
    assert rig.streams.names[1:] == ["wait", "another"]


def test_texts_wait_by_when_they_came_and_how_long_they_are() -> None:
    rig = Rig(num_threads=1)
    rig.block()
    rig.take("huge", 3_000_000, received=100.0)
    rig.take("first", 10_000, received=101.0)
    rig.take("second", 10_000, received=101.0)
    rig.take("late", 10_000, received=104.0)
    rig.go.set()
    rig.streams.wait(opened=5)
    rig.stop()
    assert rig.streams.names[1:] == ["first", "second", "huge", "late"]


def test_an_error_while_reading_ends_that_request_only(rig: Rig) -> None:
    def parse(wire: WireRequest) -> Any:
        if wire.request_id == "invalid":
            raise RequestError("INVALID_ARG", "no")
        if wire.request_id == "panic":
            raise BaseException("index out of bounds")  # as of Rust
        return wire.request_id

    other = Rig(parse)
    for name in ("invalid", "panic", "panic", "panic", "fine"):
        other.take(name, 2 * DIRECT_BYTES)
    other.streams.wait(opened=1, rejected=2)
    other.stop()
    assert other.streams.names == ["fine"]
    assert other.streams.errors["invalid"].code == "INVALID_ARG"
    assert other.streams.errors["panic"].message == "BaseException: index out of bounds"
    assert other.lines == ["while reading a request: BaseException: index out of bounds"] * 3


def test_who_gave_up_while_waiting_is_not_read(rig: Rig) -> None:
    rig.block()
    client = rig.take("gone", 2 * DIRECT_BYTES)
    client.cancelled = True
    rig.go.set()
    rig.streams.wait(rejected=1)
    assert rig.streams.errors["gone"].code == "CANCELLED"
    assert refusal_of(rig.streams.errors["gone"]) == "cancelled"
    assert "gone" not in rig.streams.names


def test_the_line_is_bounded_and_empties() -> None:
    rig = Rig(max_waiting_bytes=4 * DIRECT_BYTES)
    rig.block()
    rig.take("fits", DIRECT_BYTES + 1)
    rig.take("beyond", 2 * DIRECT_BYTES)
    assert rig.streams.errors["beyond"].code == "UNAVAILABLE"
    assert "bytes of long prompts wait to be tokenised" in rig.streams.errors["beyond"].message
    rig.take("short", 10)
    rig.go.set()
    rig.streams.wait(opened=4)
    rig.stop()
    assert rig.pool._num_waiting_bytes == 0


def test_what_waits_at_an_unload_is_answered(rig: Rig) -> None:
    rig.block()
    rig.take("waits", 2 * DIRECT_BYTES)
    stopping = threading.Thread(target=rig.pool.stop)
    stopping.start()
    while not rig.pool._stopping:
        pass
    rig.go.set()
    stopping.join(20)
    rig.streams.wait(opened=2, rejected=1)
    assert rig.streams.errors["waits"].message == "the model is being unloaded"


def test_a_long_text_leaves_the_lock_to_other_threads() -> None:
    """Not a time: the other thread counts while the text is tokenised, which it could not with the lock held."""
    tokenizer = demo_tokenizer()
    text = "the list of names " * 20_000
    started, counted, stop = threading.Event(), [0], threading.Event()

    def count() -> None:
        started.set()
        while not stop.wait(0.001):
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    assert started.wait(20)
    most = 0
    for _ in range(20):  # on a busy machine the other thread need not run each time
        before = counted[0]
        tokenizer.encode(text)
        most = max(most, counted[0] - before)
        if most > 3:
            break
    stop.set()
    thread.join(20)
    assert most > 3
