"""Parses requests: small ones at once, long texts and chats in threads.

Triton calls `execute` in one thread, and a text of a megabyte takes a second to tokenise.  The tokenizers library
releases Python's lock meanwhile (`tokenizer.py`), so later requests and the sender thread continue.  Another process
renders the template of a chat, which can take seconds (`render_client.py`): chats wait only for other chats.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import PriorityQueue
from typing import Protocol

import numpy as np

from inflight.frontend.chat.chat_messages import has_template
from inflight.frontend.errors import RequestError
from inflight.frontend.request.contract import WireRequest
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.request.pooled_request import is_pooled
from inflight.frontend.responder import Responder

__all__ = ["TokenizePool"]

DIRECT_BYTES = 8192  # of text: about 2 ms
_NUM_THREADS = 2
_MAX_WAITING_BYTES = 64 * 2**20
# A text is ranked as if it had arrived later, by the time that it takes: shorter ones overtake it, but never forever.
_SECONDS_PER_BYTE = 1e-6
_BYTES_PER_SHOWN_TOKEN = 16  # a token takes as long to detokenise as this much text to tokenise
_TENSOR_BYTES = 16  # of numbers, or
_PARAMETER_BYTES = 4  # of a list in a string, take as long to read as a byte of text to tokenise


Answer = Callable[[WireRequest], dict[str, np.ndarray]]


@dataclass(order=True, slots=True)
class _Waiting:
    """A request that waits for a thread; the smallest `rank` is next."""

    rank: float
    number: int
    num_bytes: int = field(compare=False)
    wire: WireRequest = field(compare=False)
    responder: Responder = field(compare=False)
    answer: Answer | None = field(compare=False, default=None)


class _OutputProcessor(Protocol):
    """The part of `OutputProcessor` that the pool needs."""

    def open(self, request: ParsedRequest, responder: Responder) -> None: ...
    def reject(self, responder: Responder, error: RequestError) -> None: ...
    def respond(self, responder: Responder, outputs: dict[str, np.ndarray]) -> None: ...


class TokenizePool:
    """Parses requests and opens their streams.

    Args:
        parse: checks and tokenises; raises RequestError. Called by several threads.
        output_processor: opens the streams, and sends errors.
        log_error: writes one line to the server's log.
        max_waiting_bytes: of text that waits for a thread; requests with long texts beyond it are refused.
        num_threads: threads for long texts; there is one more for chats, and one for chats with templates of their own.
        open_pooled: reads a request for vectors, and opens its streams.
    """

    def __init__(
        self,
        parse: Callable[[WireRequest], ParsedRequest],
        output_processor: _OutputProcessor,
        log_error: Callable[[str], None],
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
        num_threads: int = _NUM_THREADS,
        open_pooled: Callable[[WireRequest, Responder], None] | None = None,
    ) -> None:
        self._parse = parse
        self._output_processor = output_processor
        self._log_error = log_error
        self._open_pooled = open_pooled
        self._max_waiting_bytes = max_waiting_bytes
        self._texts: PriorityQueue[_Waiting] = PriorityQueue()
        self._chats: PriorityQueue[_Waiting] = PriorityQueue()
        self._templates: PriorityQueue[_Waiting] = PriorityQueue()  # slow ones must not hold up other chats
        self._lock = threading.Lock()  # guards the two below
        self._num_waiting_bytes = 0
        self._count = 0
        self._stopping = False
        self._readers = [
            (queue, threading.Thread(target=self._read_loop, args=(queue,), name=f"tokenize-{k}", daemon=True))
            for k, queue in enumerate([self._texts] * num_threads + [self._chats, self._templates])
        ]

    def start(self) -> None:
        for _, thread in self._readers:
            thread.start()

    def stop(self) -> None:
        """Refuse waiting requests, and end the threads when they have finished their current ones."""
        self._stopping = True
        for queue, _ in self._readers:
            queue.put(_Waiting(float("inf"), 0, 0, WireRequest({}), _NO_RESPONDER))
        for _, thread in self._readers:
            if thread.ident is not None:
                thread.join()

    def take(self, wire: WireRequest, responder: Responder, answer: Answer | None = None) -> None:
        """Open the request's stream, now or when a thread has parsed it.

        Args:
            answer: makes a single answer instead of a stream, and takes as long as parsing.  Raises RequestError.

        Raises:
            RequestError: it is refused now.  Later errors are sent to the client.
        """
        num_bytes, is_chat = _num_text_bytes(wire), "messages" in wire.inputs
        if num_bytes <= DIRECT_BYTES and not is_chat:
            return self._serve(wire, responder, answer)
        with self._lock:
            if self._num_waiting_bytes and self._num_waiting_bytes + num_bytes > self._max_waiting_bytes:
                raise RequestError(
                    "UNAVAILABLE",
                    f"{self._num_waiting_bytes} bytes of long prompts wait to be tokenised and "
                    f"{self._max_waiting_bytes} are allowed; try again later",
                )
            self._num_waiting_bytes += num_bytes
            self._count += 1
            rank = wire.received + num_bytes * _SECONDS_PER_BYTE
            queue = self._queue_of(wire)
            queue.put(_Waiting(rank, self._count, num_bytes, wire, responder, answer))

    def _queue_of(self, wire: WireRequest) -> PriorityQueue[_Waiting]:
        if "messages" not in wire.inputs:
            return self._texts
        chat = wire.inputs["messages"].reshape(-1)[:1].tolist()
        return self._templates if chat and isinstance(chat[0], bytes) and has_template(chat[0]) else self._chats

    @contextmanager
    def errors_to(self, responder: Responder) -> Iterator[None]:
        """Send the errors of the block to the client: a bug or a tokenizer's panic must affect no other request."""
        try:
            yield
        except RequestError as error:
            self._output_processor.reject(responder, error)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            message = f"{type(error).__name__}: {error}"
            self._log_error(f"while reading a request: {message}")
            self._output_processor.reject(responder, RequestError("INTERNAL", message))

    def _read_loop(self, queue: PriorityQueue[_Waiting]) -> None:
        while (waiting := queue.get()).responder is not _NO_RESPONDER:
            with self.errors_to(waiting.responder):
                self._read(waiting)
            with self._lock:
                self._num_waiting_bytes -= waiting.num_bytes

    def _read(self, waiting: _Waiting) -> None:
        if self._stopping:
            raise RequestError("UNAVAILABLE", "the model is being unloaded")
        if waiting.responder.is_cancelled():
            raise RequestError("CANCELLED", "Request was cancelled")
        self._serve(waiting.wire, waiting.responder, waiting.answer)

    def _serve(self, wire: WireRequest, responder: Responder, answer: Answer | None) -> None:
        if answer is None and self._open_pooled is not None and is_pooled(wire):
            self._open_pooled(wire, responder)
        elif answer is None:
            self._output_processor.open(self._parse(wire), responder)
        else:
            self._output_processor.respond(responder, answer(wire))


class _NoResponder:
    """Marks the entry that ends a thread."""

    def prepare(self, outputs: object, final: bool) -> Callable[[], None]:
        return lambda: None

    def send(self, outputs: object, final: bool) -> None: ...
    def fail(self, code: str, message: str) -> None: ...
    def is_cancelled(self) -> bool:
        return False


_NO_RESPONDER = _NoResponder()


def _num_text_bytes(wire: WireRequest) -> int:
    """Bytes of text that take as long to tokenise as this request to read."""
    arrays, strings = wire.inputs.values(), (value for value in wire.parameters.values() if isinstance(value, str))
    texts = sum(sum(map(len, array.flat)) for array in arrays if array.dtype.kind == "O")
    numbers = sum(array.nbytes for array in arrays if array.dtype.kind != "O")
    shown = wire.inputs.get("input_ids" if "control" in wire.parameters else "resume_token_ids")
    tokens = 0 if shown is None else shown.size
    lists = numbers // _TENSOR_BYTES + sum(map(len, strings)) // _PARAMETER_BYTES
    return texts + lists + _BYTES_PER_SHOWN_TOKEN * tokens
