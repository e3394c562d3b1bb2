"""Open response streams: deltas in, coalesced responses out.

The sender thread owns every stream: it takes deltas, detokenises, finds stop strings and sends.
Streams with new output take turns (`stream_scheduler.py`), each for a slice of time: a costly stream falls
behind, and the others do not.  The deltas that it missed go into one response.  The responses of several
turns are sent in a row (`outbox.py`).  The cancellation thread finds streams that must end early.

    reader thread --on_step--> events --> sender thread --> Triton
    execute ------open/reject---^   ^---- cancellation thread (cancelled, deadline passed)

Every stream ends exactly once (invariant 6): `_close` removes it from the table, and only the code that
removed it sends its FINAL flag.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue

import numpy as np

from inflight.engine.deltas import RequestFailed
from inflight.engine.messages import REQUESTS_PER_FRONTEND, EngineReady, StepMessage
from inflight.frontend.engine_client.replay import Replay
from inflight.frontend.errors import RequestError, error_of, refusal_of
from inflight.frontend.output.backpressure import Backpressure
from inflight.frontend.output.cancellation import CHECK_SECONDS, CancellationWatcher
from inflight.frontend.output.interfaces import EngineClient, StatsSink
from inflight.frontend.output.open_limit import OpenLimit
from inflight.frontend.output.outbox import Outbox
from inflight.frontend.output.pacing import Pacing
from inflight.frontend.output.request_state import RequestState
from inflight.frontend.output.send_queue import SLICE, SendQueue
from inflight.frontend.request.parsed_request import ParsedRequest
from inflight.frontend.responder import Responder
from inflight.frontend.text.tokenizer import Tokenizer

__all__ = ["OutputProcessor"]

# Turns whose responses are made before they are sent, and seconds after which no other turn is added.
_MOST_TURNS, _TURNS_SECONDS = 16, 0.002


class OutputProcessor:
    """All open streams of a model instance.

    Args:
        engine: takes requests and aborts.
        stats: counts steps and requests.
        log_error, log_info: write one line to the server's log.
        max_sequences: maximum number of open sequences; a request beyond it is refused at once.  0: no limit.
        interval: new tokens that a streaming response waits for, after the first response of its stream.
        pacing: spaces the responses of a stream instead; None: each is sent at once.
        number: of this frontend among the frontends of the engine.
        check_seconds: between two checks for cancelled and late requests.
        max_replays: see `PoisonSearch`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine: EngineClient,
        stats: StatsSink,
        log_error: Callable[[str], None],
        max_sequences: int = 0,
        interval: int = 1,
        check_seconds: float = CHECK_SECONDS,
        log_info: Callable[[str], None] = lambda line: None,
        pacing: Pacing | None = None,
        number: int = 0,
        max_replays: int = 2,
    ) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._stats = stats
        self._log_error = log_error
        self._log_info = log_info
        self._open_limit = OpenLimit(max_sequences, first_id=number * REQUESTS_PER_FRONTEND + 1)
        self._interval = interval
        self._pacing = pacing
        self._streams: dict[int, RequestState] = {}
        self._streaming: set[int] = set()  # those of them whose clients get responses before the last
        self._queue = SendQueue()
        self._outbox = Outbox(self._sent, self._lost)
        self._replay = Replay(
            engine, self._streams, self._fail, stats.resubmitted, max_replays, self._run_behind_output, self._run_later
        )
        # A step comes with the time of its arrival.
        self._events: SimpleQueue[tuple[float, StepMessage] | Callable[[], None] | None] = SimpleQueue()
        self._backpressure = Backpressure(engine, self._events.put, self._replay.again)
        self._sender = threading.Thread(target=self._send_loop, name="sender", daemon=True)
        self._cancellation = CancellationWatcher(self.open_streams, self._drop, check_seconds)

    # -- any thread ------------------------------------------------------------------------

    def start(self) -> None:
        self._sender.start()
        self._cancellation.start()

    def open(self, request: ParsedRequest, responder: Responder) -> None:
        """Hand a request to the engine; its responses follow through `responder`."""
        count = request.engine_request.params.n
        try:
            request = request.with_id(self._open_limit.take(count))
        except RequestError as error:
            return self.reject(responder, error)
        try:
            stream = RequestState(request, responder, self._tokenizer, self._interval)
        except BaseException:  # the caller answers
            self._open_limit.give_back(count)
            raise
        self._events.put(partial(self._register, stream))
        if stream.finished:  # the output that it began with is complete
            return
        try:
            self._engine.submit(stream.engine_request)
        except RequestError as error:
            self._fail_behind(stream.request_id, error, refusal_of(error))
        except Exception as error:  # answered here: the caller would answer a stream that is open
            message = f"internal error: {type(error).__name__}: {error}"
            self._fail_behind(stream.request_id, RequestError("INTERNAL", message), "failed")

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended."""
        return self._open_limit.num_requests

    @property
    def num_open_sequences(self) -> int:
        """Sequences of those requests."""
        return self._open_limit.num_sequences

    def open_streams(self) -> list[RequestState]:
        """The streams at this moment."""
        return list(self._streams.values())  # one C call: the sender thread cannot change the dict meanwhile

    def refuse_new(self, make_error: Callable[[], RequestError]) -> None:
        """Refuse every request from now on; accepted requests continue."""
        self._open_limit.close(make_error)

    def end_all(self, error: RequestError) -> None:
        """End all open streams with an error."""
        self._events.put(partial(self._fail_all, error))

    def reject(self, responder: Responder, error: RequestError) -> None:
        """Answer a request that never became a stream with an error."""
        self._events.put(partial(self._refuse, responder, error))

    def respond(self, responder: Responder, outputs: dict[str, np.ndarray]) -> None:
        """Answer a request that never became a stream with one final response."""
        self._events.put(partial(self._respond, responder, outputs))

    def run(self, action: Callable[[], None]) -> None:
        """Call `action` in the sender thread, after what was queued before it."""
        self._events.put(action)

    def on_step(self, message: StepMessage) -> None:
        """A step's deltas; called by the thread that reads the engine's pipe."""
        self._events.put((time.monotonic(), message))
        for failed in message.failed:
            self._fail_behind(failed.request_id, error_of(failed), "failed")

    def on_request_failed(self, message: RequestFailed) -> None:
        """The engine refused a request."""
        error = error_of(message)
        self._fail_behind(message.request_id, error, refusal_of(error))

    def on_engine_ready(self, ready: EngineReady) -> None:
        """The engine process was started again."""
        self._events.put(partial(self._stats.engine_ready, ready, again=True))
        self._events.put(self._replay.engine_ready)

    def on_engine_down(self, request_ids: Iterable[int], ran: Mapping[int, set[int]], cause: str) -> None:
        """The engine process died with these requests in it: the next process continues them."""
        self._run_behind_output(self._stats.engine_down)
        self._events.put(partial(self._replay.engine_down, request_ids, ran, cause))

    def _run_behind_output(self, action: Callable[[], None]) -> None:
        """`run`, once the output of all steps that the engine has reported is processed."""
        self._events.put(self._catch_up)
        self._events.put(action)

    def _run_later(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, self._events.put, [action])
        timer.daemon = True  # what fires behind the end of the sender thread is never run
        timer.start()

    def on_no_engine(self, error: RequestError) -> None:
        """No engine process can be started for now."""
        self._events.put(partial(self._fail_all, error))

    def stop(self, reason: str) -> None:
        """Fail open requests with UNAVAILABLE and end the threads."""
        self._events.put(partial(self._fail_all, RequestError("UNAVAILABLE", reason)))
        self._events.put(None)
        self._cancellation.stop()
        if self._sender.ident is not None:
            self._sender.join()

    # -- cancellation thread ---------------------------------------------------------------

    def _drop(self, stream: RequestState, ending: str, make_error: Callable[[], RequestError]) -> None:
        stream.dropped = True
        self._engine.abort(stream.request_id)  # at once: the sender thread may be busy, and its blocks are free now
        last_act = lambda: self._cancel(stream, make_error(), ending)  # noqa: E731
        self._events.put(partial(self._end_behind, stream.request_id, last_act))

    def _fail_behind(self, request_id: int, error: RequestError, ending: str) -> None:
        """`_fail` a stream after it has sent the output that has arrived for it."""
        self._events.put(partial(self._end_behind, request_id, partial(self._fail, request_id, error, ending)))

    # -- sender thread ---------------------------------------------------------------------

    def _send_loop(self) -> None:
        """Process the events that have arrived, give streams their turns until another one arrives, and repeat."""
        while (event := self._next_event()) is not None:
            self._run_event(partial(self._take, *event) if isinstance(event, tuple) else event)
            del event  # it can refer to a stream that has ended, and the next one may be long in coming

    def _next_event(self) -> tuple[float, StepMessage] | Callable[[], None] | None:
        if self._queue.is_busy and self._events.empty():
            return self._serve_until_event
        try:
            return self._events.get(timeout=self._queue.idle_seconds(time.monotonic()))
        except Empty:
            return self._serve_until_event

    def _run_event(self, event: Callable[[], None]) -> None:
        try:
            event()
        except BaseException as error:  # without this thread all streams hang; a Rust panic is no Exception
            self._log_error(f"in the sender thread: {type(error).__name__}: {error}")

    def _take(self, received: float, message: StepMessage) -> None:
        streams, tokens, pacing = self._streams, message.tokens, self._pacing
        most_waiting = 0 if pacing is None else pacing.most_tokens
        for delta in message.full_deltas:
            stream = streams.get(delta.request_id)
            if stream is not None:  # else it has ended here, and the engine does not know yet
                stream.inbox.add(delta)
                self._took(stream, received, delta.finish_reason is not None)
        for request_id, index, token_id in zip(tokens.request_ids, tokens.indices, tokens.token_ids):
            stream = streams.get(request_id)
            if stream is not None:
                inbox = stream.inbox
                inbox.add_token(index, token_id)
                if received >= stream.early or inbox.num_waiting >= most_waiting:
                    self._took(stream, received, False)
        if pacing is not None:
            ids = chain(tokens.request_ids, [delta.request_id for delta in message.full_deltas])
            if count := len(self._streaming.intersection(ids)):
                pacing.step(count)
        self._replay.took(message)
        self._stats.step(message, received, streams)

    def _took(self, stream: RequestState, received: float, ends: bool) -> None:
        """Output of a stream has arrived: it gets a turn now, or when its next response is due."""
        self._backpressure.took(stream)
        if ends or not stream.may_wait or not self._hold(stream, received):
            self._queue.add(stream)
        elif self._pacing is not None:
            stream.early = self._pacing.early(stream)

    def _hold(self, stream: RequestState, now: float) -> bool:
        """Whether the stream's next response is not due yet; if so, the stream gets a turn when it is."""
        due = None if self._pacing is None else self._pacing.due(stream, now)
        if due is not None:
            self._queue.hold(stream, due)
        return due is not None

    def _serve_until_event(self) -> None:
        """Serve streams until an event arrives or none is waiting for a turn."""
        self._serve_some()
        while self._queue.is_busy and self._events.empty():
            self._serve_some()

    def _serve_some(self) -> None:
        """Give streams their turns, and then send the responses that were made."""
        late = time.monotonic() + _TURNS_SECONDS
        try:
            for _ in range(_MOST_TURNS):
                self._serve_next()
                if not self._queue.is_busy or time.monotonic() >= late:
                    break
        finally:
            self._outbox.send_all()

    def _serve_next(self) -> None:
        """Serve the next stream once.  Streams that have ended are served first, once the metrics include them."""
        start = time.monotonic()
        if ended := self._queue.take_ended(start):
            self._outbox.send_all()  # publishing takes a while
            self._settle()
            for stream in ended:
                stream.settled = True
                self._queue.add(stream)
        elif (next_stream := self._queue.take(start)) is not None:
            if next_stream.prompt_logprobs is not None:  # they are long: no other stream's response waits for them
                self._outbox.send_all()
                start = time.monotonic()
            self._guarded(self._advance, next_stream)
            if not next_stream.closed:
                self._queue.charge(next_stream, time.monotonic() - start)
                if next_stream.inbox and next_stream.end_time is None:  # behind its end nothing counts
                    self._queue.add(next_stream)
                self._backpressure.served(next_stream)

    def _catch_up(self) -> None:
        """Process all deltas that have arrived, and serve streams until none is waiting for a turn."""
        for stream in self._streams.values():
            if stream.inbox:
                self._queue.add(stream)
        while self._queue.is_busy:
            self._serve_some()

    def _guarded(self, action: Callable[[RequestState], None], stream: RequestState) -> None:
        if stream.closed:
            return
        try:
            action(stream)
        except BaseException as error:  # a bug, a panic or a lost client must end no other stream
            self._broke(stream, error)

    def _advance(self, stream: RequestState) -> None:
        if stream.end_time is not None:
            return self._send(stream, final=True) if stream.settled else None
        for index in stream.take_inbox(SLICE):
            self._engine.abort(stream.request_id, index)
        if stream.first_token_time is None and (stream.num_output_tokens or stream.pooled is not None):
            stream.first_token_time = time.monotonic()
            self._stats.first_token(stream)
        if stream.finished:
            self._finish(stream)
        elif stream.last_act is not None and not stream.inbox:
            self._send_output(stream)
            stream.last_act()
        elif not (stream.has_started and self._hold(stream, time.monotonic())):
            self._send_output(stream)

    def _send_output(self, stream: RequestState) -> None:
        if stream.request.stream and stream.has_new_output:
            self._send(stream, final=False)

    def _finish(self, stream: RequestState) -> None:
        stream.end_time = time.monotonic()
        stream.inbox.clear()
        self._queue.finish(stream)
        self._stats.finished(stream)

    def _send(self, stream: RequestState, final: bool) -> None:
        """Make the responses of a turn; they are sent behind it (`_serve_some`)."""
        start, parts, sends = time.monotonic(), stream.parts(final), []
        try:
            for number, sequences in enumerate(parts, 1):
                sends.append(stream.responder.prepare(stream.outputs(sequences), final and number == len(parts)))
        except BaseException:  # the stream's error comes behind the parts that are made
            self._outbox.add(stream, sends, time.monotonic() - start, False)
            raise
        stream.sent()
        stream.sent_time, stream.due, stream.early = time.monotonic(), 0.0, 0.0
        self._outbox.add(stream, sends, stream.sent_time - start, final)

    def _sent(self, stream: RequestState, made_seconds: float, sent_seconds: float, final: bool) -> None:
        if self._pacing is not None:
            self._pacing.sent(made_seconds + sent_seconds)
        if final:
            self._close(stream)
            self._engine.release(stream.request_id)
        else:
            self._queue.charge_more(stream, sent_seconds)

    def _lost(self, stream: RequestState, error: BaseException) -> None:
        """A response could not be sent: what waits for its due time would follow a gap."""
        stream.due = 0.0
        self._broke(stream, error)

    def _broke(self, stream: RequestState, error: BaseException) -> None:
        """A bug, a panic or a lost client: the stream ends with an error."""
        self._log_error(f"stream {stream.request_id}: {type(error).__name__}: {error}")
        failure = RequestError("INTERNAL", f"{type(error).__name__}: {error}")
        self._run_event(partial(self._fail, stream.request_id, failure, "failed"))

    def _register(self, stream: RequestState) -> None:
        self._streams[stream.request_id] = stream
        if stream.request.stream:
            self._streaming.add(stream.request_id)
        if stream.finished:
            self._queue.add(stream)
        else:
            self._cancellation.wake()

    def _close(self, stream: RequestState) -> None:
        stream.closed = True
        stream.last_act = None  # it refers to the stream, which is to go with its last reference
        self._queue.forget(stream)
        del self._streams[stream.request_id]
        self._streaming.discard(stream.request_id)
        self._replay.ended(stream.request_id)
        self._open_limit.give_back(len(stream.sequences))

    def _cancel(self, stream: RequestState, error: RequestError, ending: str) -> None:
        if not stream.closed:
            name = f" {stream.request.name!r}" if stream.request.name else ""
            log = (lambda line: None) if stream.request.quiet else self._log_info
            log(  # both lines in vllm_backend's words
                f"Cancelling the request {stream.request_id}{name} after {stream.num_output_tokens} output tokens: "
                f"{error.message}"
            )
            self._fail(stream.request_id, error, ending)
            log(f"Successfully cancelled the request {stream.request_id}")

    def _end_behind(self, request_id: int, last_act: Callable[[], None]) -> None:
        """End a stream with `last_act` after it has sent the output that has arrived; the first such call counts."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.last_act is None:
            stream.last_act = last_act
            self._queue.add(stream)

    def _fail(self, request_id: int, error: RequestError, ending: str) -> None:
        """End a stream with an error of the kind `ending`; does nothing if it has ended."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.due:  # output is waiting for its due time
            stream.due = 0.0
            self._guarded(self._send_output, stream)
        self._outbox.send_all()  # what was made comes before the error
        if stream is None or stream.closed:
            return
        self._close(stream)
        self._engine.abort(request_id)
        if stream.end_time is None:  # else it counts as finished: only its last response was lost
            self._stats.unsuccessful(ending, stream)
        self._respond_error(stream.responder, error)

    def _fail_all(self, error: RequestError) -> None:
        self._catch_up()
        for stream in self._streams.values():
            stream.dropped = True  # no engine is to get one when another one ends
        for request_id in list(self._streams):
            self._fail(request_id, error, "failed")

    def _refuse(self, responder: Responder, error: RequestError) -> None:
        self._stats.unsuccessful(refusal_of(error))
        self._respond_error(responder, error)

    def _respond(self, responder: Responder, outputs: dict[str, np.ndarray]) -> None:
        try:
            responder.send(outputs, True)
        except Exception as lost:
            self._log_error(f"cannot send an answer: {type(lost).__name__}: {lost}")
            error = RequestError("INTERNAL", f"internal error: the answer cannot be sent: {lost}")
            self._respond_error(responder, error)

    def _settle(self) -> None:
        try:
            self._stats.settle()
        except Exception as error:
            self._log_error(f"cannot publish metrics: {type(error).__name__}: {error}")

    def _respond_error(self, responder: Responder, error: RequestError) -> None:
        self._settle()
        try:
            responder.fail(error.code, error.message)
        except Exception as lost:
            self._log_error(f"cannot send the error {error.message!r} to its client: {lost}")
