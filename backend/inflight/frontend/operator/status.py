"""The status of a model instance, for operators: the frontend's part and the engine's.

The frontend's part needs no engine: while the engine is down, starting or hung, the answer still arrives, and says
so.  Requests for the status that arrive together share one question to the engine.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import msgspec

import inflight
from inflight.engine.messages import EngineReady, GetStats, Question
from inflight.frontend.errors import RequestError
from inflight.frontend.lifecycle.drain import Drain
from inflight.frontend.operator.counters import Counters
from inflight.frontend.output.output_processor import OutputProcessor

__all__ = ["InstanceIdentity", "InstanceStatus"]

_ENGINE_SECONDS = 0.4  # for the engine to answer; a client waits for two such rounds at most


class _Supervisor(Protocol):
    def ask(self, question: Question) -> Future[Any]: ...
    @property
    def refusal(self) -> str | None: ...
    @property
    def pid(self) -> int | None: ...


@dataclass(frozen=True)
class InstanceIdentity:
    """Constant facts of a model instance; `instance` is Triton's name of it."""

    model: str
    version: str
    instance: str
    checkpoint: str


class InstanceStatus:
    """Answers with JSON, from a thread of its own.

    Args:
        ready: the first engine process's description of itself.
        replays: returns the number of requests that were sent to a new engine process.
    """

    def __init__(
        self,
        identity: InstanceIdentity,
        ready: EngineReady,
        supervisor: _Supervisor,
        output_processor: OutputProcessor,
        drain: Drain,
        counters: Counters,
        replays: Callable[[], int] = lambda: 0,
    ) -> None:
        self._identity = identity
        self._ready = ready
        self._supervisor = supervisor
        self._output_processor = output_processor
        self._drain = drain
        self._counters = counters
        self._replays = replays
        self._started = time.monotonic()
        self._asked: SimpleQueue[Future[bytes] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the supervisor has been stopped, so no answer of the engine is awaited."""
        self._asked.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def ask(self) -> Future[bytes]:
        """The status within a second, as JSON."""
        answer: Future[bytes] = Future()
        self._asked.put(answer)
        return answer

    def _loop(self) -> None:
        while (first := self._asked.get()) is not None:
            waiting: list[Future[bytes] | None] = [first]
            try:
                while True:
                    waiting.append(self._asked.get_nowait())
            except Empty:
                pass
            try:
                text = msgspec.json.encode(self._snapshot())
            except Exception as error:  # without this thread every later request for the status would hang
                failure = RequestError("INTERNAL", f"internal error: no status: {type(error).__name__}: {error}")
                for answer in filter(None, waiting):
                    answer.set_exception(failure)
            else:
                for answer in filter(None, waiting):
                    answer.set_result(text)
            if None in waiting:
                return

    def _snapshot(self) -> dict[str, Any]:
        engine, problem = self._ask_engine()
        last, ready = self._counters.last_step, self._ready
        return {
            "model": self._identity.model,
            "version": self._identity.version,
            "instance": self._identity.instance,
            "state": self._state(problem),
            "reason": self._supervisor.refusal or problem,
            "inflight": inflight.__version__,
            "checkpoint": self._identity.checkpoint,
            "device": ready.device,
            "dtype": ready.dtype,
            "attention_backend": ready.attention_backend,
            "max_model_len": ready.max_model_len,
            "num_blocks": ready.num_blocks,
            "block_size": ready.block_size,
            "frontend": {
                "pid": os.getpid(),
                "uptime_seconds": time.monotonic() - self._started,
                "open_requests": self._output_processor.num_open,
                "open_sequences": self._output_processor.num_open_sequences,
                "requests": dict(self._counters.requests),
                "generation_tokens": self._counters.generation_tokens,
                "engine_deaths": self._counters.deaths,
                "engine_restarts": self._counters.restarts,
                "replays": self._replays(),
                "seconds_since_step": self._counters.seconds_since_step(),
                "last_step": None if last is None else msgspec.structs.asdict(last),
            },
            "engine": engine,
        }

    def _state(self, problem: str | None) -> str:
        """The state in one word."""
        if self._drain.draining:
            return "drained" if self._drain.drained else "draining"
        if self._supervisor.refusal is not None:
            return "failed"
        if self._supervisor.pid is None:
            return "restarting"
        return "ready" if problem is None else "unresponsive"

    def _ask_engine(self) -> tuple[dict[str, Any] | None, str | None]:
        """The engine's part, or the reason why there is none."""
        if self._supervisor.pid is None:
            return None, "the engine process is being restarted"
        answer = self._supervisor.ask(GetStats())
        try:
            return answer.result(_ENGINE_SECONDS), None
        except FutureTimeoutError:
            answer.cancel()
            return None, f"the engine process did not answer within {_ENGINE_SECONDS:g} s: a long step, or it hangs"
        except RequestError as error:
            return None, error.message
