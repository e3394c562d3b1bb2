"""Open response streams: deltas in, coalesced responses out.

One thread (`sender`) owns every stream: it takes deltas, detokenises, finds stop strings and
sends.  While it sends, further steps queue up; the next round puts all a stream missed into one
response.  A second thread (`sweep`) asks Triton which clients are gone and watches deadlines.

    reader thread --on_step--> events --> sender thread --> Triton
    execute ------open/reject---^   ^---- sweep thread (cancelled, late)

Every stream ends exactly once (invariant 6): it leaves the table in `_close`, and only who took
it out of the table has sent its FINAL flag.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from inflight.engine.messages import RequestFailed, SequenceDelta, StepMessage, StepStats, TokenLogprobs, TraceDump
from inflight.frontend.contract import GenerationRequest
from inflight.frontend.errors import ErrorCode, RequestError
from inflight.frontend.outputs import SequenceOutput, response_outputs
from inflight.frontend.text import Tokenizer

__all__ = ["Engine", "Responder", "StatsSink", "Stream", "Streams"]

# Asking Triton costs about 0.15 ms a stream, and other messages wait meanwhile: a sweep starts
# this long after the one before, and sweeping takes at most a quarter of the time.
SWEEP_SECONDS = 0.07
_SWEEP_REST = 3.0


class Responder(Protocol):
    """The way back to one client."""

    def send(self, outputs: dict[str, np.ndarray], final: bool) -> None:
        """One response; `final` is the FINAL flag.  Raises when the client cannot be reached."""

    def fail(self, code: ErrorCode, message: str) -> None:
        """One error response with the FINAL flag."""

    def is_cancelled(self) -> bool:
        """Whether the client gave up; true stays true."""


class Engine(Protocol):
    """The supervisor, as far as streams need it.  Calls never block."""

    def submit(self, request_id: int, request: GenerationRequest) -> None:
        """Hand over; raises RequestError when it is not taken."""

    def dump_trace(self, request_id: int) -> None:
        """Ask for the step trace; raises RequestError when that cannot be done."""

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Stop a request or one of its sequences; unknown ones are ignored."""

    def release(self, request_id: int) -> None:
        """The request ended by itself."""


class StatsSink(Protocol):
    """Takes what becomes metrics.  Calls are cheap: no communication in them."""

    def step(self, stats: StepStats, num_output_tokens: int) -> None: ...
    def engine_down(self) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def finished(self, stream: Stream) -> None: ...


class Stream:
    """One request and its way back.  Owned by the sender thread.

    Attributes:
        request_id: the engine's id of it.
        sequences: its n outputs.
        closed: it had its FINAL flag.
        dropped: the sweep thread gave it up; its end is on the way.
        first_token_time, end_time: `time.monotonic()`, None until then.
    """

    def __init__(
        self, request_id: int, request: GenerationRequest, responder: Responder, tokenizer: Tokenizer, interval: int
    ) -> None:
        self.request_id = request_id
        self._interval = interval
        self._num_sent_tokens = 0
        self.request = request
        self.responder = responder
        self.sequences = [SequenceOutput(request, tokenizer) for _ in range(request.params.n)]
        self.inbox: list[SequenceDelta] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if "return_prompt_logprobs" in request.returns else None
        self.closed = False
        self.dropped = False
        self.first_token_time: float | None = None
        self.end_time: float | None = None
        # Token ids and logprobs are worth a response even when they complete no text.
        self._sends_tokens = bool({"return_token_ids", "return_logprobs"} & request.returns)

    @property
    def num_output_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def has_news(self) -> bool:
        """Whether a streaming client should get a response now."""
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.request.prompt_token_ids):
            return False  # they go on the first response, whole
        if self._num_sent_tokens and self.num_output_tokens - self._num_sent_tokens < self._interval:
            return False
        return any(s.text or (self._sends_tokens and s.new_token_ids) for s in self.sequences)

    def sent(self) -> None:
        """All that it has so far is on its way."""
        self._num_sent_tokens = self.num_output_tokens

    def take_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Once, for the first response."""
        logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return logprobs


class Streams:
    """All open streams of a model instance.

    Args:
        engine: where requests go and aborts are sent.
        stats: takes step and request statistics.
        log_error: writes one line to the server's log.
        max_sequences: beyond as many open sequences a request is refused at once; 0 lifts it.
        interval: new tokens that a streaming client's response waits for, after its first one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine: Engine,
        stats: StatsSink,
        log_error: Callable[[str], None],
        max_sequences: int = 0,
        interval: int = 1,
        sweep_seconds: float = SWEEP_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._stats = stats
        self._log_error = log_error
        self._max_sequences = max_sequences
        self._interval = interval
        self._sweep_seconds = sweep_seconds
        self._streams: dict[int, Stream] = {}
        self._traces: dict[int, Responder] = {}  # who waits for the step trace; the sender thread's
        self._events: SimpleQueue[StepMessage | Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._open_sequences = 0
        self._next_id = 0
        self._stopping = threading.Event()
        self._any_open = threading.Event()
        self._threads = [
            threading.Thread(target=self._send_loop, name="sender", daemon=True),
            threading.Thread(target=self._sweep_loop, name="sweep", daemon=True),
        ]

    # -- any thread ------------------------------------------------------------------------

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def open(self, request: GenerationRequest, responder: Responder) -> None:
        """Hand a request to the engine; its responses follow through `responder`."""
        count = request.params.n
        if self._max_sequences and count > self._max_sequences:
            text = f"n={count} is more than the {self._max_sequences} sequences that may be open at all"
            return self.reject(responder, RequestError("INVALID_ARG", text))
        with self._lock:
            if self._max_sequences and self._open_sequences + count > self._max_sequences:
                error = RequestError(
                    "UNAVAILABLE",
                    f"the queue is full: {self._open_sequences} sequences are open and {self._max_sequences} are "
                    "allowed (max_num_seqs + max_queue_size); try again later",
                )
                return self.reject(responder, error)
            self._open_sequences += count
            self._next_id += 1
            request_id = self._next_id
        try:
            stream = Stream(request_id, request, responder, self._tokenizer, self._interval)
        except BaseException:  # the caller answers
            with self._lock:
                self._open_sequences -= count
            raise
        self._events.put(partial(self._register, stream))
        try:
            self._engine.submit(request_id, request)
        except RequestError as error:
            self._events.put(partial(self._fail, request_id, error))

    def dump_trace(self, responder: Responder) -> None:
        """Answer with the engine's step trace, JSON in `text_output`, or with why there is none."""
        with self._lock:
            self._next_id += 1
            request_id = self._next_id
        self._events.put(lambda: self._traces.update({request_id: responder}))
        try:
            self._engine.dump_trace(request_id)
        except RequestError as error:
            self._events.put(partial(self._fail, request_id, error))

    def reject(self, responder: Responder, error: RequestError) -> None:
        """Answer a request that never became a stream."""
        self._events.put(partial(self._respond_error, responder, error))

    def on_step(self, message: StepMessage) -> None:
        """A step's deltas; called by the thread that reads the engine's pipe."""
        self._events.put(message)

    def on_request_failed(self, message: RequestFailed) -> None:
        """The engine did not take a request."""
        error = RequestError(message.code, message.message)  # type: ignore[arg-type]
        self._events.put(partial(self._fail, message.request_id, error))

    def on_trace(self, message: TraceDump) -> None:
        """The engine's answer to `dump_trace`."""
        self._events.put(partial(self._send_trace, message))

    def on_engine_down(self, request_ids: Iterable[int], reason: str) -> None:
        """The engine process died with these requests in it."""
        error = RequestError("UNAVAILABLE", reason)
        for request_id in request_ids:
            self._events.put(partial(self._fail, request_id, error))
        self._events.put(self._stats.engine_down)  # behind the steps that it had sent

    def stop(self, reason: str) -> None:
        """Fail what is open with UNAVAILABLE and end the threads."""
        self._stopping.set()
        self._any_open.set()
        self._events.put(partial(self._fail_all, RequestError("UNAVAILABLE", reason)))
        self._events.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    # -- sender thread ---------------------------------------------------------------------

    def _send_loop(self) -> None:
        """Take all that waits, then give every stream with news one response."""
        dirty: dict[int, Stream] = {}
        while (event := self._events.get()) is not None:
            more = True
            while more and event is not None:
                if isinstance(event, StepMessage):
                    self._take(event, dirty)
                else:
                    self._advance_all(dirty)  # deltas that came before the event count before it
                    self._run_event(event)
                try:
                    event = self._events.get_nowait()
                except Empty:
                    more = False
            self._advance_all(dirty)
            if event is None:
                return

    def _run_event(self, event: Callable[[], None]) -> None:
        try:
            event()
        except BaseException as error:  # without this thread every stream would hang; Rust's panics are no Exception
            self._log_error(f"in the sender thread: {type(error).__name__}: {error}")

    def _take(self, message: StepMessage, dirty: dict[int, Stream]) -> None:
        num_tokens = 0
        for delta in message.deltas:
            num_tokens += len(delta.token_ids)
            stream = self._streams.get(delta.request_id)
            if stream is not None:  # else it ended here while the engine had not heard of it
                stream.inbox.append(delta)
                dirty[delta.request_id] = stream
        self._stats.step(message.stats, num_tokens)

    def _advance_all(self, dirty: dict[int, Stream]) -> None:
        for stream in dirty.values():
            if stream.closed:
                continue
            try:
                self._advance(stream)
            except BaseException as error:  # a bug, a panic or a lost client must not end the other streams
                self._log_error(f"stream {stream.request_id}: {type(error).__name__}: {error}")
                self._fail(stream.request_id, RequestError("INTERNAL", f"{type(error).__name__}: {error}"))
        dirty.clear()

    def _advance(self, stream: Stream) -> None:
        inbox, stream.inbox = stream.inbox, []
        for delta in inbox:
            if stream.prompt_logprobs is not None and delta.prompt_logprobs:
                stream.prompt_logprobs += delta.prompt_logprobs
            sequence = stream.sequences[delta.index]
            already_ended = sequence.finish_reason is not None
            sequence.advance(delta)
            if sequence.ended_by_stop and not already_ended and delta.finish_reason is None:
                self._engine.abort(stream.request_id, delta.index)
        if stream.first_token_time is None and stream.num_output_tokens:
            stream.first_token_time = time.monotonic()
            self._stats.first_token(stream.first_token_time - stream.request.arrival)
        if stream.finished:
            self._send(stream, final=True)
            self._close(stream)
            self._engine.release(stream.request_id)
            self._stats.finished(stream)
        elif stream.request.stream and stream.has_news:
            self._send(stream, final=False)

    def _send(self, stream: Stream, final: bool) -> None:
        outputs = response_outputs(stream.request, stream.sequences, self._tokenizer, stream.take_prompt_logprobs())
        stream.responder.send(outputs, final)
        stream.sent()

    def _send_trace(self, message: TraceDump) -> None:
        self._engine.release(message.request_id)
        responder = self._traces.pop(message.request_id, None)
        if responder is None:
            return
        try:
            responder.send({"text_output": np.array([message.trace], dtype=np.object_)}, True)
        except Exception as lost:
            self._log_error(f"cannot answer a request for the step trace: {lost}")
            self._respond_error(responder, RequestError("INTERNAL", f"the step trace cannot be sent: {lost}"))

    def _register(self, stream: Stream) -> None:
        self._streams[stream.request_id] = stream
        self._any_open.set()

    def _close(self, stream: Stream) -> None:
        stream.closed = True
        stream.end_time = time.monotonic()
        del self._streams[stream.request_id]
        with self._lock:
            self._open_sequences -= len(stream.sequences)

    def _fail(self, request_id: int, error: RequestError) -> None:
        """End a stream with an error; nothing happens when it has ended."""
        if (asker := self._traces.pop(request_id, None)) is not None:
            self._engine.release(request_id)
            return self._respond_error(asker, error)
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._close(stream)
        self._engine.abort(request_id)
        self._respond_error(stream.responder, error)

    def _fail_all(self, error: RequestError) -> None:
        for request_id in [*self._streams, *self._traces]:
            self._fail(request_id, error)

    def _fail_late(self, request_id: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            message = (
                f"deadline exceeded: the request's timeout of {stream.request.timeout:g} s ran out "
                f"after {stream.num_output_tokens} output tokens"
            )
            self._fail(request_id, RequestError("CANCELLED", message))

    def _respond_error(self, responder: Responder, error: RequestError) -> None:
        try:
            responder.fail(error.code, error.message)
        except Exception as lost:
            self._log_error(f"cannot answer a request with {error.message!r}: {lost}")

    # -- sweep thread ----------------------------------------------------------------------

    def _sweep_loop(self) -> None:
        while not self._stopping.is_set():
            self._any_open.wait()
            self._any_open.clear()
            while not self._stopping.is_set() and self._streams:
                start = time.monotonic()
                self._sweep()
                took = time.monotonic() - start
                self._stopping.wait(self._pause(max(self._sweep_seconds, _SWEEP_REST * took)))

    def _pause(self, seconds: float) -> float:
        """Seconds until the next sweep: sooner when a deadline comes sooner."""
        now = time.monotonic()
        left = [stream.request.deadline - now for stream in self._snapshot() if stream.request.deadline is not None]
        return max(0.001, min([seconds, *left]))

    def _snapshot(self) -> list[Stream]:
        # `list` of a dict's values is one C call: the sender thread cannot change the dict meanwhile.
        return [stream for stream in list(self._streams.values()) if not stream.dropped]

    def _sweep(self) -> None:
        now = time.monotonic()
        for stream in self._snapshot():
            deadline = stream.request.deadline
            if deadline is not None and deadline <= now:
                self._drop(stream, partial(self._fail_late, stream.request_id))
            elif self._is_cancelled(stream):
                error = RequestError("CANCELLED", "Request was cancelled")
                self._drop(stream, partial(self._fail, stream.request_id, error))

    def _drop(self, stream: Stream, event: Callable[[], None]) -> None:
        stream.dropped = True
        self._engine.abort(stream.request_id)  # at once: the blocks need not wait for the sender
        self._events.put(event)

    def _is_cancelled(self, stream: Stream) -> bool:
        try:
            return not stream.closed and stream.responder.is_cancelled()
        except Exception:  # closed meanwhile
            return False
