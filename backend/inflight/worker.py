"""The engine process: a pipe in, a step loop, a pipe out.

Started by the frontend as `python -m inflight.worker --fd N`.  The first frame is the
encoded `EngineConfig`; after that `messages.py` both ways.  The process ends on `Shutdown`, when
the pipe closes (its frontend died) or when loading or a step fails.
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
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from inflight.config import ConfigError, EngineConfig
from inflight.engine.messages import (
    AbortRequest,
    AddRequest,
    DumpTrace,
    EngineFailed,
    EngineReady,
    RequestFailed,
    Shutdown,
    ToEngine,
    ToFrontend,
    TraceDump,
    decode_to_engine,
    encode,
)

if TYPE_CHECKING:
    from inflight.engine.core import EngineCore

__all__ = ["main", "settle_garbage_collector"]


def _read(connection: Connection, inbox: SimpleQueue[ToEngine]) -> None:
    """Reader thread: messages arrive while a step runs; a closed pipe is a shutdown."""
    try:
        while True:
            inbox.put(decode_to_engine(connection.recv_bytes()))
    except (EOFError, OSError):
        inbox.put(Shutdown())


def _load(connection: Connection, config: EngineConfig) -> EngineCore | None:
    """Load the checkpoint and report; None when it cannot be served."""
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
    """Keep collections out of the steps: they take milliseconds when they look at a loaded model.

    What lives now stays for good.  Steps make no cycles, so that objects come and go in balance and
    the first generation rarely grows by as many.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def _serve(connection: Connection, core: EngineCore, inbox: SimpleQueue[ToEngine]) -> None:
    """Step while there is work, sleep on the inbox while there is none."""
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
            elif isinstance(message, DumpTrace):
                _send(connection, _trace_answer(message.request_id, core))
            else:
                return
        _step(connection, core)


def _step(connection: Connection, core: EngineCore) -> None:
    message = core.step()
    start = time.monotonic()
    _send(connection, message)
    if core.trace is not None:
        core.trace.sent(time.monotonic() - start)


def _trace_answer(request_id: int, core: EngineCore) -> TraceDump | RequestFailed:
    if core.trace is None:
        text = 'step_trace is off: set "step_trace": true in model.json and load the model again'
        return RequestFailed(request_id, "INVALID_ARG", text)
    return TraceDump(request_id, core.trace.snapshot().to_json())


def _send(connection: Connection, message: ToFrontend) -> None:
    connection.send_bytes(encode(message))


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the frontend's socket pair")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the server, which then tells us
    connection = Connection(args.fd)
    config = msgspec.msgpack.decode(connection.recv_bytes(), type=EngineConfig)
    # The cores are shared with the server, the stub and clients: a thread that spins at OpenMP's
    # barriers would take the core from whoever the barrier waits for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if config.cpu_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.cpu_threads)  # before torch is imported
    gc.disable()  # until it is settled: what imports and loading make stays, and looking at it is a fifth of their time
    try:
        core = _load(connection, config)
        if core is None:
            return 1
        settle_garbage_collector()
        inbox: SimpleQueue[ToEngine] = SimpleQueue()
        threading.Thread(target=_read, args=(connection, inbox), name="reader", daemon=True).start()
        _serve(connection, core, inbox)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the frontend is gone, and nobody is left to tell
    except Exception as error:
        traceback.print_exc()
        _send(connection, EngineFailed(f"engine step failed: {type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # torch's teardown takes a second or two that an unload would wait for
