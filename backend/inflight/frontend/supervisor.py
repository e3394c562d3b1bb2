"""Keeps one engine process running and carries messages to and from it.  No torch, no Triton.

    start() -> STARTING -> UP -> (died) -> DOWN -> STARTING ... -> stop()

Requests are queued and written by a thread of their own, so `submit` never blocks.  When the
process dies, the requests it had taken fail at once; those still queued, and new ones, wait for
the next process.  After several failed starts in a row they are refused until a start succeeds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from inflight.config import EngineConfig
from inflight.engine.messages import (
    AbortRequest,
    AddRequest,
    DumpTrace,
    EngineReady,
    RequestFailed,
    StepMessage,
    TraceDump,
    encode,
)
from inflight.frontend.contract import GenerationRequest
from inflight.frontend.engine_process import EngineProcess, EngineStartError, engine_command
from inflight.frontend.errors import RequestError

__all__ = ["EngineEvents", "RestartPolicy", "Supervisor"]


class EngineEvents(Protocol):
    """Who hears of the engine; called by the supervisor's thread."""

    def on_step(self, message: StepMessage) -> None: ...
    def on_request_failed(self, message: RequestFailed) -> None: ...
    def on_trace(self, message: TraceDump) -> None: ...
    def on_engine_down(self, request_ids: Iterable[int], reason: str) -> None: ...


class RestartPolicy:
    """When to start again after a death, and when to refuse requests meanwhile.

    Args:
        first_delay, longest_delay: seconds; the delay doubles from one to the other.
        healthy_seconds: a process that lived as long starts the count anew.
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
        """Seconds before the start that follows the `deaths`-th death or failed start in a row."""
        return min(self.longest_delay, self.first_delay * 2 ** min(deaths - 1, 30))


def _unexpected(error: Exception) -> EngineStartError:
    return EngineStartError(f"cannot start the engine process: {type(error).__name__}: {error}")


class Supervisor:
    """Starts the engine process, feeds it, watches it, starts it again.

    Args:
        config: sent to the engine as its first frame.
        log: takes (level, line) with level "info", "warn" or "error".
        command: command line of the engine less `--fd N`; None takes the real one.
        env: environment variables for the engine on top of this process's.
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
        self._process: EngineProcess | None = None
        self._up = False
        self._stopping = False
        self._first: EngineReady | EngineStartError | None = None
        self._refusal: str | None = None
        self._queued: OrderedDict[int, bytes] = OrderedDict()
        self._aborts: deque[bytes] = deque()
        self._in_engine: set[int] = set()
        self._threads = [
            threading.Thread(target=self._run, name="supervisor", daemon=True),
            threading.Thread(target=self._write_loop, name="engine-writer", daemon=True),
        ]

    # -- any thread ------------------------------------------------------------------------

    def start(self) -> EngineReady:
        """Start the engine and wait until it has loaded the model.

        Raises:
            EngineStartError: with the engine's own message; nothing is left running.
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
        """Name who hears of the engine, and let messages flow; after `start`, once."""
        with self._changed:
            self._events = events
            self._changed.notify_all()
        self._threads[1].start()

    def submit(self, request_id: int, request: GenerationRequest) -> None:
        """Queue a request for the engine.

        Raises:
            RequestError: UNAVAILABLE; the engine cannot be started, or too many wait for it.
        """
        frame = encode(
            AddRequest(
                request_id=request_id,
                prompt_token_ids=request.prompt_token_ids,
                params=request.params,
                priority=request.priority,
                tenant=request.tenant,
                deadline=request.deadline,
                cache_salt=request.cache_salt,
                arrival=request.arrival,
            )
        )
        self._enqueue(request_id, frame)

    def dump_trace(self, request_id: int) -> None:
        """Ask the engine for its step trace; raises as `submit` does."""
        self._enqueue(request_id, encode(DumpTrace(request_id)))

    def _enqueue(self, request_id: int, frame: bytes) -> None:
        most = self._config.max_queue_size
        with self._changed:
            if self._refusal is not None:
                raise RequestError("UNAVAILABLE", self._refusal)
            if most and not self._up and len(self._queued) >= most:
                raise RequestError(
                    "UNAVAILABLE", f"the engine is being restarted and {most} requests (max_queue_size) wait for it"
                )
            self._queued[request_id] = frame
            self._changed.notify_all()

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Stop a request (`index` None) or one of its sequences; unknown ones are ignored."""
        with self._changed:
            if self._queued.pop(request_id, None) is not None or request_id not in self._in_engine:
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
    def pid(self) -> int | None:
        """Process id of the engine that is up, else None."""
        with self._changed:
            return self._process.pid if self._process is not None and self._up else None

    def stop(self) -> None:
        """End the engine process and the threads; safe to repeat."""
        with self._changed:
            self._stopping = True
            process, was_up = self._process, self._up
            self._up = False
            self._changed.notify_all()
        if process is not None:
            process.stop(polite=was_up)  # one that is loading reads no messages
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()

    # -- supervisor thread -----------------------------------------------------------------

    def _run(self) -> None:
        """One process after another, until stopped or the first one fails."""
        deaths = failed_starts = 0
        while not self._is_stopping():
            try:
                process, ready = self._start_process()
            # Of any kind: without this thread `start` and every request would wait for good.
            except Exception as caught:
                error = caught if isinstance(caught, EngineStartError) else _unexpected(caught)
                if self._first is None:
                    return self._report_first(error)
                deaths, failed_starts = deaths + 1, failed_starts + 1
                self._note_failed_start(error, failed_starts)
            else:
                self._report_first(ready)
                failed_starts, born = 0, time.monotonic()
                self._read(process)
                lived = time.monotonic() - born
                deaths = 1 if lived >= self._restart.healthy_seconds else deaths + 1
                self._bury(process)
            self._pause(self._restart.delay(deaths))

    def _start_process(self) -> tuple[EngineProcess, EngineReady]:
        process = EngineProcess(self._config, self._command, self._env)
        with self._changed:
            self._process = process
            stopping = self._stopping
        try:
            if stopping:  # stop() may have come before it could see this process
                raise EngineStartError("the model is being unloaded")
            ready = process.wait_ready(self._config.engine_start_timeout)
        except Exception:
            with self._changed:
                self._process = None
            process.stop(polite=False)
            process.close()
            raise
        with self._changed:
            self._up, self._refusal = True, None
            self._changed.notify_all()
        return process, ready

    def _read(self, process: EngineProcess) -> None:
        """Pass messages on until the pipe closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._events is not None or self._stopping)
            events = self._events
        if events is None:
            return
        try:
            while True:
                message = process.receive()
                if isinstance(message, StepMessage):
                    events.on_step(message)
                elif isinstance(message, RequestFailed):
                    events.on_request_failed(message)
                elif isinstance(message, TraceDump):
                    events.on_trace(message)
        except (EOFError, OSError):
            pass

    def _bury(self, process: EngineProcess) -> None:
        """Fail what died with the process."""
        with self._changed:
            self._up = False
            self._process = None
            victims, self._in_engine = self._in_engine, set()
            self._aborts.clear()
            stopping = self._stopping
        cause = process.exit_text()
        process.close()
        if stopping:
            return
        reason = f"the engine process died ({cause}); it is being restarted"
        self._log("error", f"{reason}; {len(victims)} open requests failed")
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
        assert self._events is not None
        self._events.on_engine_down(waiting, refusal)

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
        """Write aborts before new requests: they free what the new ones need."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or (self._up and (self._aborts or self._queued)))
                if self._stopping:
                    return
                process = self._process
                if self._aborts:
                    frame = self._aborts.popleft()
                else:
                    request_id, frame = self._queued.popitem(last=False)
                    self._in_engine.add(request_id)
            assert process is not None
            try:
                process.send(frame)
            except OSError:  # it died: the supervisor thread will see that and fail the request
                time.sleep(0.01)
