"""The program of the engine process: a pipe in, a step loop, a pipe out.

The frontend starts it like `python -m inflight.worker --fd N` (`frontend/engine_process.py`).  The first
frame is the encoded `EngineConfig`; then `engine/messages.py` both ways.  It exits on `Shutdown`, when
the pipe closes (the frontend died), and when loading or a step fails.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from inflight.config import ConfigError, EngineConfig
from inflight.engine.engine_stats import engine_stats
from inflight.engine.holding import HELD_POLL_SECONDS
from inflight.engine.messages import (
    AbortRequest,
    AddRequest,
    Answer,
    Ask,
    DumpTrace,
    EngineFailed,
    EngineReady,
    GetStats,
    Shutdown,
    ToEngine,
    ToFrontend,
    decode_to_engine,
    encode,
)
from inflight.runner.cpu_threads import available_cpus

if TYPE_CHECKING:
    from inflight.engine.core import EngineCore

__all__ = ["main", "settle_garbage_collector"]


def _step_trace(core: EngineCore, question: DumpTrace) -> bytes:
    if core.trace is None:
        raise ValueError('step_trace is off: set "step_trace": true in model.json and reload the model')
    return core.trace.snapshot().to_json()


# Who answers which question.  A handler runs between two steps and returns plain data; a ValueError
# says what is wrong with the question.
_HANDLERS: dict[type, Callable[[EngineCore, Any], Any]] = {
    DumpTrace: _step_trace,
    GetStats: lambda core, question: engine_stats(core),
}


def _read(connection: Connection, inbox: SimpleQueue[ToEngine]) -> None:
    """Reader thread: messages arrive while a step runs.  A closed pipe means shutdown."""
    try:
        while True:
            inbox.put(decode_to_engine(connection.recv_bytes()))
    except (EOFError, OSError):
        inbox.put(Shutdown())


def _load(connection: Connection, config: EngineConfig) -> EngineCore | None:
    """Load the checkpoint and report; None if it cannot be served."""
    from inflight.engine.core import EngineCore
    from inflight.loading.loader import LoadError
    from inflight.runner.pipeline import make_runner

    try:
        runner = make_runner(config)
    except (ConfigError, LoadError) as error:
        _send(connection, EngineFailed(str(error), fatal=True))
        return None
    except Exception as error:
        traceback.print_exc()
        message = f"loading {config.model!r} failed: {type(error).__name__}: {error}"
        _send(connection, EngineFailed(message, fatal=True))
        return None
    info = runner.info
    ready = EngineReady(
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        num_blocks=info.num_blocks,
        block_size=config.block_size,
        dtype=info.dtype,
        device=info.device,
        attention_backend=info.attention_backend,
        load_seconds=info.load_seconds,
    )
    _send(connection, ready)
    return EngineCore(config, runner)


def settle_garbage_collector() -> None:
    """Keep garbage collections out of the steps: with a loaded model they take milliseconds.

    What lives now is not scanned again.  Steps create no cycles, so objects come and go in balance, and the
    youngest generation rarely reaches the threshold.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def _serve(connection: Connection, core: EngineCore, inbox: SimpleQueue[ToEngine]) -> None:
    """Step while there is work; sleep on the inbox while there is none."""
    while True:
        while not inbox.empty() or not core.has_work:
            message = inbox.get()
            if isinstance(message, AddRequest):
                failure = core.add_request(message)
                if failure is not None:
                    _send(connection, failure)
            elif isinstance(message, AbortRequest):
                core.abort(message.request_id, message.index)
                if not core.has_work:
                    _step(connection, core)  # an empty step: the metrics see the blocks return
            elif isinstance(message, Ask):
                _send(connection, _answer(core, message))
            else:
                return
        _step(connection, core)


def _step(connection: Connection, core: EngineCore) -> None:
    message = core.step()
    if core.only_holds and not message.stats.batch_size and not message.failed:
        time.sleep(HELD_POLL_SECONDS)  # nothing ran, and nothing will before something outside arrives
        return
    start = time.monotonic()
    _send(connection, message)
    if core.trace is not None:
        core.trace.sent(time.monotonic() - start)


def _answer(core: EngineCore, ask: Ask) -> Answer:
    """The answer, or why there is none: a question never ends the engine."""
    try:
        return Answer(ask.question_id, _HANDLERS[type(ask.question)](core, ask.question))
    except ValueError as error:
        return Answer(ask.question_id, error=("INVALID_ARG", str(error)))
    except Exception as error:
        traceback.print_exc()
        return Answer(ask.question_id, error=("INTERNAL", f"{type(error).__name__}: {error}"))


def _send(connection: Connection, message: ToFrontend) -> None:
    connection.send_bytes(encode(message))


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the frontend's socket pair")
    args = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # from a terminal or a service manager: the frontend drains first
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(args.fd)
    config = msgspec.msgpack.decode(connection.recv_bytes(), type=EngineConfig)
    # The server, the stub and clients share the cores: a thread that spins at an OpenMP barrier would
    # take a core from the thread that the barrier waits for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Before torch is imported, which would start a thread for each core of the machine.
    if config.cpu_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.cpu_threads)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(available_cpus()))
    gc.disable()  # until settled: what imports and loading create stays, and scanning it is a fifth of their time
    try:
        core = _load(connection, config)
        if core is None:
            return 1
        settle_garbage_collector()
        inbox: SimpleQueue[ToEngine] = SimpleQueue()
        threading.Thread(target=_read, args=(connection, inbox), name="reader", daemon=True).start()
        _serve(connection, core, inbox)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the frontend is gone: there is nobody to tell
    except Exception as error:
        traceback.print_exc()
        _send(connection, EngineFailed(f"engine step failed: {type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # torch's teardown takes a second or two, and an unload would wait for it
