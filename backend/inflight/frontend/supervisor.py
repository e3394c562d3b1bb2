"""Keeps one engine process running and carries messages to and from it.  No torch, no Triton.

    start() -> STARTING -> UP -> (died) -> DOWN -> STARTING ... -> stop()

Requests and questions are queued and written by a separate thread, so `submit` and `ask` never block.
When the engine process dies, what it had been sent fails at once; what is still queued, and what
arrives meanwhile, waits for the next process.  After several failed starts in a row both are refused
until a start succeeds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from inflight.config import EngineConfig
from inflight.engine.messages import (
    AbortRequest,
    AddRequest,
    Answer,
    EngineReady,
    Question,
    RequestFailed,
    StepMessage,
    encode,
)
from inflight.frontend.engine_process import EngineProcess, EngineStartError, engine_command
from inflight.frontend.errors import RequestError
from inflight.frontend.questions import Questions

__all__ = ["EngineEvents", "RestartPolicy", "Supervisor"]

_UNLOADING = "the model is being unloaded"


class EngineEvents(Protocol):
    """Receives what becomes of requests.  Called by the supervisor's thread; must not block."""

    def on_step(self, message: StepMessage) -> None: ...
    def on_request_failed(self, message: RequestFailed) -> None: ...
    def on_engine_ready(self, ready: EngineReady) -> None: ...
    def on_engine_down(self, request_ids: Iterable[int], reason: str) -> None: ...


class RestartPolicy:
    """When to restart a dead engine process, and when to refuse requests meanwhile.

    Args:
        first_delay, longest_delay: seconds; the delay doubles from the first to the longest.
        healthy_seconds: a process that lived this long resets the delay.
        refuse_after: failed starts in a row after which requests are refused.
    """

    def __init__(
        self,
        first_delay: float = 0.1,
        longest_delay: float = 30.0,
        healthy_seconds: float = 60.0,
        refuse_after: int = 3,
    ) -> None:
        self.first_delay = first_delay
        self.longest_delay = longest_delay
        self.healthy_seconds = healthy_seconds
        self.refuse_after = refuse_after

    def delay(self, deaths: int) -> float:
        """Seconds to wait after the `deaths`-th death or failed start in a row."""
        return min(self.longest_delay, self.first_delay * 2 ** min(deaths - 1, 30))


def _unexpected(error: Exception) -> EngineStartError:
    return EngineStartError(f"cannot start the engine process: {type(error).__name__}: {error}")


class Supervisor:
    """Starts the engine process, feeds it, watches it and restarts it.

    Args:
        config: sent to the engine process as its first frame.
        log: takes (level, line) with level "info", "warn" or "error".
        command: command line of the engine process without `--fd N`; None means the real one.
        env: environment variables for it, added to this process's.
        restart: when to restart it.
    """

    def __init__(
        self,
        config: EngineConfig,
        log: Callable[[str, str], None],
        *,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        restart: RestartPolicy | None = None,
    ) -> None:
        self._config = config
        self._log = log
        self._command = list(command or engine_command(config))
        self._env = dict(env or {})
        self._restart = restart or RestartPolicy()
        self._events: EngineEvents | None = None
        self._changed = threading.Condition()  # guards all below
        self._engine_process: EngineProcess | None = None
        self._up = False
        self._stopping = False
        self._first: EngineReady | EngineStartError | None = None
        self._refusal: str | None = None
        self._queued: OrderedDict[int, tuple[bytes, int]] = OrderedDict()  # frame, sequences
        self._num_queued = 0  # sequences
        self._aborts: deque[bytes] = deque()
        self._in_engine: set[int] = set()
        self._questions = Questions()
        self._threads = [
            threading.Thread(target=self._run, name="supervisor", daemon=True),
            threading.Thread(target=self._write_loop, name="engine-writer", daemon=True),
        ]

    # -- any thread ------------------------------------------------------------------------

    def start(self) -> EngineReady:
        """Start the engine process and wait until it has loaded the model.

        Raises:
            EngineStartError: with the engine's message; nothing is left running.
        """
        self._threads[0].start()
        with self._changed:
            self._changed.wait_for(lambda: self._first is not None)
        if isinstance(self._first, EngineReady):
            return self._first
        self.stop()
        assert self._first is not None
        raise self._first

    def connect(self, events: EngineEvents) -> None:
        """Set the receiver and let messages flow; once, after `start`."""
        with self._changed:
            self._events = events
            self._changed.notify_all()
        self._threads[1].start()

    def submit(self, request: AddRequest) -> None:
        """Queue a request for the engine.

        Raises:
            RequestError: UNAVAILABLE; the engine cannot be started or is being stopped, or too many
                requests wait for it.
        """
        frame = encode(request)
        with self._changed:
            self._check_open(request.params.n)
            self._queued[request.request_id] = frame, request.params.n
            self._num_queued += request.params.n
            self._changed.notify_all()

    def ask(self, question: Question) -> Future[Any]:
        """Put a question to the engine, which answers it between two steps.

        The supervisor's thread resolves the future: callbacks must not block.  Cancelling the future
        withdraws the question.

        Returns:
            The answer, or a RequestError: what the engine says, or UNAVAILABLE if it dies before it
            answers, cannot be started or is being stopped, or if too much waits for it.
        """
        with self._changed:
            try:
                self._check_open(1)
            except RequestError as error:
                refused: Future[Any] = Future()
                refused.set_exception(error)
                return refused
            future = self._questions.add(question)
            self._changed.notify_all()
        return future

    def _check_open(self, count: int) -> None:
        """Raise RequestError if no `count` sequences more may be queued.  Called with the lock held."""
        if self._stopping:
            raise RequestError("UNAVAILABLE", _UNLOADING)
        if self._refusal is not None:
            raise RequestError("UNAVAILABLE", self._refusal)
        limit = self._config.max_queue_size
        queued = self._num_queued + self._questions.num_queued
        if limit and not self._up and queued + count > limit:
            raise RequestError(
                "UNAVAILABLE",
                f"the engine is being restarted and {queued} sequences wait for it (max_queue_size={limit})",
            )

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Stop one sequence of a request, or all of them (`index` None); unknown ones are ignored."""
        with self._changed:
            if request_id in self._queued and index is None:
                self._num_queued -= self._queued.pop(request_id)[1]
            if request_id not in self._in_engine:
                return
            if index is None:
                self._in_engine.discard(request_id)
            self._aborts.append(encode(AbortRequest(request_id, index)))
            self._changed.notify_all()

    def release(self, request_id: int) -> None:
        """Forget a request that ended by itself."""
        with self._changed:
            self._in_engine.discard(request_id)

    @property
    def can_serve(self) -> bool:
        """Whether a request that comes now would be served, perhaps by an engine that is being restarted."""
        with self._changed:
            return self._refusal is None and not self._stopping

    @property
    def refusal(self) -> str | None:
        """Why requests are refused: the engine process cannot be restarted.  None while they are taken."""
        with self._changed:
            return self._refusal

    @property
    def pid(self) -> int | None:
        """Process id of the engine process if it is up, else None."""
        with self._changed:
            return self._engine_process.pid if self._engine_process is not None and self._up else None

    def stop(self) -> None:
        """Fail open questions, end the engine process and the threads; safe to repeat."""
        with self._changed:
            self._stopping = True
            engine_process, was_up = self._engine_process, self._up
            self._up = False
            self._changed.notify_all()
        self._questions.fail_all(RequestError("UNAVAILABLE", _UNLOADING))
        if engine_process is not None:
            engine_process.stop(polite=was_up)  # while it loads it reads no messages
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()

    # -- supervisor thread -----------------------------------------------------------------

    def _run(self) -> None:
        """Run one engine process after another, until stopped or the first one fails."""
        deaths = failed_starts = 0
        while not self._is_stopping():
            try:
                engine_process, ready = self._start_process()
            except Exception as caught:  # of any kind: without this thread `start` and every request would hang
                error = caught if isinstance(caught, EngineStartError) else _unexpected(caught)
                if self._first is None:
                    return self._report_first(error)
                deaths, failed_starts = deaths + 1, failed_starts + 1
                self._note_failed_start(error, failed_starts)
            else:
                if self._first is not None and self._events is not None:
                    self._events.on_engine_ready(ready)
                self._report_first(ready)
                failed_starts, born = 0, time.monotonic()
                self._read(engine_process)
                lived = time.monotonic() - born
                deaths = 1 if lived >= self._restart.healthy_seconds else deaths + 1
                self._bury(engine_process)
            self._pause(self._restart.delay(deaths))

    def _start_process(self) -> tuple[EngineProcess, EngineReady]:
        engine_process = EngineProcess(self._config, self._command, self._env)
        with self._changed:
            self._engine_process = engine_process
            stopping = self._stopping
        try:
            if stopping:  # stop() may have run before it could see this process
                raise EngineStartError(_UNLOADING)
            ready = engine_process.wait_ready(self._config.engine_start_timeout)
        except Exception:
            with self._changed:
                self._engine_process = None
            engine_process.stop(polite=False)
            engine_process.close()
            raise
        with self._changed:
            self._up, self._refusal = True, None
            self._changed.notify_all()
        return engine_process, ready

    def _read(self, engine_process: EngineProcess) -> None:
        """Pass messages on until the pipe closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._events is not None or self._stopping)
            events = self._events
        if events is None:
            return
        try:
            while True:
                message = engine_process.receive()
                if isinstance(message, StepMessage):
                    events.on_step(message)
                elif isinstance(message, RequestFailed):
                    events.on_request_failed(message)
                elif isinstance(message, Answer):
                    self._questions.resolve(message)
        except (EOFError, OSError):
            pass

    def _bury(self, engine_process: EngineProcess) -> None:
        """Fail what died with the process."""
        with self._changed:
            self._up = False
            self._engine_process = None
            victims, self._in_engine = self._in_engine, set()
            self._aborts.clear()
            stopping = self._stopping
        cause = engine_process.exit_text()
        engine_process.close()
        if stopping:
            return
        reason = f"the engine process died ({cause}); it is being restarted"
        self._log("error", f"{reason}; {len(victims)} open requests failed")
        self._questions.fail_sent(RequestError("UNAVAILABLE", reason))
        assert self._events is not None
        self._events.on_engine_down(victims, reason)

    def _note_failed_start(self, error: EngineStartError, failed_starts: int) -> None:
        self._log("error", f"restart {failed_starts} of the engine process failed: {error}")
        if failed_starts < self._restart.refuse_after and not error.fatal:
            return
        refusal = f"the engine process cannot be restarted ({failed_starts} attempts failed): {error}"
        with self._changed:
            self._refusal = refusal
            waiting = list(self._queued)
            self._queued.clear()
            self._num_queued = 0
        self._questions.fail_all(RequestError("UNAVAILABLE", refusal))
        assert self._events is not None
        for request_id in waiting:
            self._events.on_request_failed(RequestFailed(request_id, "UNAVAILABLE", refusal))

    def _report_first(self, outcome: EngineReady | EngineStartError) -> None:
        with self._changed:
            if self._first is None:
                self._first = outcome
                self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, timeout=seconds)

    def _is_stopping(self) -> bool:
        with self._changed:
            return self._stopping

    # -- writer thread ---------------------------------------------------------------------

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or (self._up and self._has_frames()))
                if self._stopping:
                    return
                engine_process, frame = self._engine_process, self._next_frame()
            if engine_process is None or frame is None:  # the asker withdrew the question meanwhile
                continue
            try:
                engine_process.send(frame)
            except OSError:  # it died: the supervisor thread will notice, and fail the request
                time.sleep(0.01)

    def _has_frames(self) -> bool:
        return bool(self._aborts or self._questions.num_queued or self._queued)

    def _next_frame(self) -> bytes | None:
        """Aborts go first: they free what new requests need."""
        if self._aborts:
            return self._aborts.popleft()
        frame = self._questions.take_frame()
        if frame is None and self._queued:
            request_id, (frame, n) = self._queued.popitem(last=False)
            self._num_queued -= n
            self._in_engine.add(request_id)
        return frame
