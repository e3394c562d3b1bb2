"""Keeps one engine process running and carries messages to and from it.  No torch, no Triton.

    start() -> STARTING -> UP -> (died) -> DOWN -> STARTING ... -> stop()

Requests and questions are queued and written by a separate thread, so `submit` and `ask` never block.
When the engine process dies, the receiver of its messages returns the requests that the next one continues
(`resubmit`); queued and new requests wait behind them.  After several failed starts in a row, requests fail
and are refused until a start succeeds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from inflight.config import EngineConfig
from inflight.engine.deltas import RequestFailed
from inflight.engine.messages import AddRequest, Answer, EngineReady, GetStats, Question, StepMessage
from inflight.frontend.engine_client.engine_handle import EngineHandle
from inflight.frontend.engine_client.engine_launcher import EngineLauncher
from inflight.frontend.engine_client.engine_process import EngineStartError, engine_command
from inflight.frontend.engine_client.pending_questions import PendingQuestions
from inflight.frontend.engine_client.restart_policy import RestartHistory, RestartPolicy
from inflight.frontend.engine_client.send_buffer import SendBuffer
from inflight.frontend.engine_client.watchdog import Watchdog
from inflight.frontend.errors import RequestError

__all__ = ["EngineEvents", "Supervisor"]

_UNLOADING = "the model is being unloaded"


class EngineEvents(Protocol):
    """Receives the outcomes of requests.  Called by the supervisor's thread; must not block."""

    def on_step(self, message: StepMessage) -> None: ...
    def on_request_failed(self, message: RequestFailed) -> None: ...
    def on_engine_ready(self, ready: EngineReady) -> None: ...

    def on_engine_down(self, request_ids: Iterable[int], ran: Mapping[int, set[int]], cause: str) -> None:
        """The engine died with these requests in it; `resubmit` must follow, from any thread.

        Args:
            ran: request id -> its running sequences; empty if unknown.
            cause: how it ended, in a few words.
        """

    def on_no_engine(self, error: RequestError) -> None:
        """The engine cannot be restarted for now: every request must end."""


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
        launch: starts an engine process, or joins a running one; None: start one with `command` and `env`.
    """

    def __init__(
        self,
        config: EngineConfig,
        log: Callable[[str, str], None],
        *,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        restart: RestartPolicy | None = None,
        launch: Callable[[], EngineHandle] | None = None,
    ) -> None:
        self._config = config
        self._log = log
        self._launcher = EngineLauncher(config, command or engine_command(config), env or {}, launch)
        self._ended = threading.Event()  # set when every process that the watch thread started has ended
        self._watchdog = Watchdog(config.engine_timeout)
        self._restarts = RestartHistory(restart or RestartPolicy())  # used by the supervisor's thread
        self._events: EngineEvents | None = None
        self._changed = threading.Condition()  # guards all below
        self._engine_process: EngineHandle | None = None
        self._settled = True  # no suspect of an earlier death is left
        self._up = False
        self._stopping = False
        self._first: EngineReady | EngineStartError | None = None
        self._refusal: str | None = None
        self._retry_after = 1.0  # seconds; the hint of a refusal
        self._send_buffer = SendBuffer()
        self._questions = PendingQuestions()
        self._threads = [
            threading.Thread(target=self._run, name="supervisor", daemon=True),
            threading.Thread(target=self._write_loop, name="engine-writer", daemon=True),
            threading.Thread(target=self._watch_loop, name="engine-watch", daemon=True),
        ]

    # -- any thread ------------------------------------------------------------------------

    def start(self) -> EngineReady:
        """`begin` and `wait_until_ready`."""
        self.begin()
        return self.wait_until_ready()

    def begin(self) -> None:
        """Start the engine process, which loads the model meanwhile."""
        self._threads[0].start()

    def wait_until_ready(self) -> EngineReady:
        """Wait until the engine process has loaded the model.

        Raises:
            EngineStartError: with the engine's message; no process is left running.
        """
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
        for thread in self._threads[1:]:
            thread.start()

    def submit(self, request: AddRequest) -> None:
        """Queue a request for the engine.

        Raises:
            RequestError: UNAVAILABLE; the engine cannot be started or is being stopped, or too many
                requests wait for it.
        """
        with self._changed:
            self._check_open(request.params.n)
            self._send_buffer.add(request)
            self._changed.notify_all()

    def resubmit(self, requests: Iterable[AddRequest], hold_new: bool = False, settled: bool = True) -> None:
        """Queue requests of an engine process that died, ahead of all others; limits do not apply.

        Args:
            hold_new: new requests wait until a call without it.
            settled: all suspects have run again, or there was none.
        """
        with self._changed:
            self._send_buffer.resubmit(requests, hold_new)
            ends_turn, self._settled = settled and not self._settled, settled
            engine_process = self._engine_process
            self._changed.notify_all()
        if ends_turn and engine_process is not None:
            engine_process.end_turn()

    def recall(self, emptied: Callable[[], None]) -> set[int]:
        """Take all requests back from the engine; new ones wait until `resubmit`.

        Args:
            emptied: called once no more of their output follows, by a thread that must not be blocked; not called if
                the engine dies before: `on_engine_down` then names them.

        Returns:
            Their ids.
        """
        with self._changed:
            recalled = self._send_buffer.recall()
            answer = self._questions.add(GetStats())  # the engine answers it after the aborts
            self._changed.notify_all()
        answer.add_done_callback(lambda answer: self._recalled(answer, emptied))
        return recalled

    def _recalled(self, answer: Future[Any], emptied: Callable[[], None]) -> None:
        error = answer.exception()
        if isinstance(error, RequestError) and error.code == "UNAVAILABLE":
            return  # no engine has answered
        with self._changed:
            self._send_buffer.recalled.clear()
        emptied()

    def ask(self, question: Question) -> Future[Any]:
        """Put a question to the engine, which answers it between two steps.

        The supervisor's thread resolves the future: callbacks must not block.  Cancelling the future
        withdraws the question.

        Returns:
            The answer, or a RequestError: the engine's own, or UNAVAILABLE if it dies before the answer, cannot be
            started or is being stopped, or if too many requests wait for it.
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
        """Raise RequestError unless `count` more sequences can be queued.  Called with the lock held."""
        if self._stopping:
            raise RequestError("UNAVAILABLE", _UNLOADING)
        if self._refusal is not None:
            raise RequestError("UNAVAILABLE", self._refusal, self._retry_after)
        limit = self._config.max_queue_size
        queued = self._send_buffer.num_new + self._questions.num_queued
        waits = not self._up or self._send_buffer.holds_new
        if limit and waits and queued + count > limit:
            raise RequestError(
                "UNAVAILABLE",
                f"the engine is being restarted and {queued} sequences wait for it (max_queue_size={limit})",
            )

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Stop one sequence of a request, or all of them (`index` None); unknown ones are ignored."""
        with self._changed:
            self._send_buffer.abort(request_id, index)
            self._changed.notify_all()

    def release(self, request_id: int) -> None:
        """Forget a request that ended by itself."""
        with self._changed:
            self._send_buffer.in_engine.discard(request_id)
            self._send_buffer.recalled.discard(request_id)

    @property
    def can_serve(self) -> bool:
        """Whether a new request would be served, perhaps by an engine that is being restarted."""
        with self._changed:
            return self._refusal is None and not self._stopping

    @property
    def refusal(self) -> str | None:
        """Why requests are refused: the engine process cannot be restarted.  None while they are accepted."""
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
            engine_process.stop(polite=was_up)  # while it is loading, it reads no messages
        self._launcher.close()
        self._ended.set()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()

    # -- supervisor thread -----------------------------------------------------------------

    def _run(self) -> None:
        """Run one engine process after another, until stopped or the first one fails."""
        while not self._is_stopping():
            try:
                engine_process, ready = self._start_process()
            except Exception as caught:  # of any kind: without this thread `start` and every request would hang
                error = caught if isinstance(caught, EngineStartError) else _unexpected(caught)
                if self._first is None:
                    return self._report_first(error)
                self._note_failed_start(error)
            else:
                if self._first is not None and self._events is not None:
                    self._events.on_engine_ready(ready)
                self._report_first(ready)
                self._restarts.started()
                born = time.monotonic()
                had_tokens = self._read(engine_process)
                self._bury(engine_process, had_tokens, time.monotonic() - born)
            self._pause(self._restarts.delay)

    def _start_process(self) -> tuple[EngineHandle, EngineReady]:
        engine_process = self._launcher.launch()
        engine_process.watch_turns(self._set_turn)
        with self._changed:
            self._engine_process = engine_process
            stopping, settled = self._stopping, self._settled
        if settled:
            engine_process.end_turn()
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

    def _set_turn(self, ours: bool) -> None:
        with self._changed:
            self._send_buffer.paused = not ours
            self._changed.notify_all()

    def _read(self, engine_process: EngineHandle) -> bool:
        """Pass messages on until the pipe closes; returns whether any of them contained a token."""
        had_tokens = False
        with self._changed:
            self._changed.wait_for(lambda: self._events is not None or self._stopping)
            events = self._events
        if events is None:
            return had_tokens
        try:
            while True:
                message = engine_process.receive()
                if isinstance(message, StepMessage):
                    had_tokens = had_tokens or bool(message.full_deltas or message.tokens.token_ids)
                    self._watchdog.step_took(message.stats)
                    events.on_step(message)
                elif isinstance(message, RequestFailed):
                    events.on_request_failed(message)
                elif isinstance(message, Answer):
                    self._questions.resolve(message)
        except (EOFError, OSError):
            return had_tokens

    def _bury(self, engine_process: EngineHandle, had_tokens: bool, lived: float) -> None:
        """Report the requests that died with the process."""
        with self._changed:
            self._up = False
            self._engine_process = None
            victims, in_turn = self._send_buffer.engine_down(), not self._send_buffer.paused
            stopping, self._settled = self._stopping, False
        cause = engine_process.exit_text()
        engine_process.close()
        if stopping:
            return
        reason = f"the engine process died ({cause}); it is being restarted"
        self._log("error", f"{reason}; requests that continue in the next one: {len(victims)}")
        self._questions.fail_sent(RequestError("UNAVAILABLE", reason))
        assert self._events is not None
        self._events.on_engine_down(victims, engine_process.heartbeat.ran(), cause)
        # Otherwise the cause is a request of another frontend, which finds it or fails its requests.
        if victims or (in_turn and not engine_process.heartbeat.num_live):
            self._restarts.died(had_requests=bool(victims), had_tokens=had_tokens, lived=lived)
            self._refuse(self._restarts.refusal(cause))

    def _note_failed_start(self, error: EngineStartError) -> None:
        if error.lost:
            return self._log("error", f"{error}: another frontend used it already; it is being restarted")
        self._restarts.not_started()
        self._log("error", f"restart {self._restarts.failed_starts} of the engine process failed: {error}")
        self._refuse(self._restarts.refusal(str(error), error.fatal))

    def _refuse(self, refusal: str | None) -> None:
        """If there is a `refusal`, fail queued requests and refuse new ones until an engine is up."""
        if refusal is None:
            return
        with self._changed:
            self._refusal, self._retry_after = refusal, max(1.0, self._restarts.delay)
            self._send_buffer.clear()
        error = RequestError("UNAVAILABLE", refusal, self._retry_after)
        self._questions.fail_all(error)
        assert self._events is not None
        self._events.on_no_engine(error)

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
            if engine_process is None or frame is None:  # the question was withdrawn meanwhile
                continue
            try:
                engine_process.send(frame)
            except OSError:  # it died: the supervisor's thread will notice, and the request is replayed
                time.sleep(0.01)

    def _has_frames(self) -> bool:
        return bool(self._questions.num_queued or self._send_buffer.has_frames)

    def _next_frame(self) -> bytes | None:
        """Questions overtake requests, but no abort: the answer says that the engine has dropped the request."""
        takers = (self._send_buffer.next_abort, self._questions.take_frame, self._send_buffer.next_request)
        return next((frame for take in takers if (frame := take()) is not None), None)

    # -- watch thread ----------------------------------------------------------------------

    def _watch_loop(self) -> None:
        """Kill an engine process that hangs (the supervisor's thread will notice), and replace a dead fork server."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._stopping, timeout=self._watchdog.interval):
                    break
                engine_process = self._engine_process if self._up else None
                has_work = bool(self._send_buffer.in_engine or self._questions.num_sent)
            heartbeat = None if engine_process is None else engine_process.heartbeat
            beats, num_tokens = (None, 0) if heartbeat is None else (heartbeat.beats, heartbeat.num_tokens)
            if self._watchdog.is_stuck(time.monotonic(), beats, has_work, num_tokens) and engine_process is not None:
                allowed = self._watchdog.allowed(num_tokens)
                engine_process.kill(f"it did not finish a step in {allowed:.3g} s (engine_timeout)")
            elif engine_process is not None:
                ended = self._launcher.keep_fork_server()
                if ended is not None:
                    self._log("warn", f"the spare process ended ({ended}); another one is being started")
        self._ended.wait()  # the processes that this thread started end with it (PR_SET_PDEATHSIG)
