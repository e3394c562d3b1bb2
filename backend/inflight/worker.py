"""The program of the engine process: a pipe in, a step loop, a pipe out.

Its owner starts it like `python -m inflight.worker --fd N`.  The first frame is the encoded `EngineConfig`.
With `--fork-server` it only does the imports, and forks into such a process whenever the owner asks for one
(`fork_server.py`).
The owner is the only frontend (`frontend/engine_client/engine_process.py`), and the pipe carries the messages of
`engine/messages.py` both ways; or, with `--shared`, the owner is the daemon of a shared engine
(`frontend/engine_client/shared_engine_daemon.py`), and the pipe brings the descriptors of the frontends' pipes.
The process exits on `Shutdown`, when its owner's pipe closes, and when loading or a step fails.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from inflight.config import ConfigError, EngineConfig
from inflight.device.deferred_torch import import_torch
from inflight.engine.core import EngineCore
from inflight.engine.deltas import RequestFailed
from inflight.engine.frontend_channels import Frontend, Frontends, Inbox, Joined, Left, accept_into, read_into
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.heartbeat_listener import HeartbeatListener
from inflight.engine.held_requests import HELD_POLL_SECONDS
from inflight.engine.kv_events.kv_events import KVEvents
from inflight.engine.last_steps import collect_last_steps
from inflight.engine.messages import (
    AbortRequest,
    AddRequest,
    Answer,
    Ask,
    DumpTrace,
    EngineFailed,
    EngineReady,
    GetStats,
    LoadAdapter,
)
from inflight.engine.operator_stats import engine_stats
from inflight.engine.request_times import make_request_times
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step_trace import StepTrace, make_trace
from inflight.fork_server import serve_forks
from inflight.grammars.demand import share_demand
from inflight.load_phases import enter_phase, print_phases
from inflight.loading.saved.newly_kept import NewlyKept
from inflight.loading.saved.prefetch import prefetch
from inflight.runner.cpu_threads import available_cpus

__all__ = ["Engine", "main", "serve", "settle_garbage_collector"]

_IDLE_BEAT_SECONDS = 1.0


@dataclass
class Engine:
    """The core that the process serves, the trace of its steps and its KV events, if they are on."""

    core: EngineCore
    trace: StepTrace | None
    kv_events: KVEvents | None = None
    ready_since: float = field(default_factory=time.monotonic)


def _dump_trace(engine: Engine, question: DumpTrace) -> bytes:
    if engine.trace is None:
        raise ValueError('step_trace is off: set "step_trace": true in model.json and reload the model')
    return engine.trace.snapshot().to_json()


def _load_adapter(engine: Engine, question: LoadAdapter) -> Future[dict[str, Any]]:
    if (adapters := engine.core.info.adapters) is None:
        raise ValueError('LoRA is off: set "enable_lora": true in model.json and reload the model')
    return adapters.load(question.ref)


# The handler of each question.  It runs between two steps and returns plain data; its ValueError
# explains what is wrong with the question.
_HANDLERS: dict[type, Callable[[Engine, Any], Any]] = {
    DumpTrace: _dump_trace,
    GetStats: lambda engine, question: engine_stats(engine.core, engine.ready_since),
}
# The same for questions that steps need not wait for: what they return is done in another thread.
_LATE_HANDLERS: dict[type, Callable[[Engine, Any], Future[Any]]] = {LoadAdapter: _load_adapter}


def _load(owner: Frontend, config: EngineConfig, heartbeat: Heartbeat) -> tuple[Engine, EngineReady] | None:
    """Load the checkpoint; if it cannot be served, tell the owner and return None."""
    print_phases(config.model)
    if "torch" not in sys.modules:  # not a fork
        enter_phase("importing torch")
        prefetch(config)
        import_torch()
    from inflight.engine.assembly import make_core
    from inflight.engine.kv_events.kv_events import expect_kv_events, make_kv_events
    from inflight.loading.load_errors import LoadError
    from inflight.runner.pipeline import make_runner, placed

    gc.freeze()  # what imports have made stays, and to look for garbage in it takes 0.15 s
    try:
        config = placed(config)
        expect_kv_events(config)
        runner = make_runner(config)
        kv_events = make_kv_events(config)
    except (ConfigError, LoadError) as error:
        owner.send(EngineFailed(str(error), fatal=True))
        return None
    except Exception as error:
        traceback.print_exc()
        message = f"loading {config.model!r} failed: {type(error).__name__}: {error}"
        owner.send(EngineFailed(message, fatal=True))
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
        pooler=info.pooler,
    )
    trace = make_trace(config, info.num_blocks)
    listeners = [HeartbeatListener(heartbeat), *([] if trace is None else [trace]), *make_request_times(config)]
    core = make_core(config, runner, listeners=listeners, recorder=kv_events)
    return Engine(core, trace, kv_events), ready


def settle_garbage_collector() -> None:
    """Keep garbage collections out of the steps: with a loaded model they take milliseconds.

    Objects that live now are not scanned again.  Steps create no cycles, so as many objects die as are created,
    and the youngest generation rarely reaches the threshold.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def serve(engine: Engine, frontends: Frontends, inbox: Inbox, heartbeat: Heartbeat) -> None:
    """Step while there is work; sleep on the inbox while there is none."""
    core = engine.core
    while True:
        while not inbox.empty() or not core.has_work:
            heartbeat.beat(len(core.live_ids))
            try:
                sender, message = inbox.get(timeout=_IDLE_BEAT_SECONDS)
            except Empty:
                _warm_up_grammars(core)
                frontends.send_idle(core.step().stats)  # an empty step: blocks return whose loads ended after the last
                continue
            if isinstance(message, AddRequest):
                if frontends.takes_over(sender, message.request_id):
                    core.abort(message.request_id)
                heartbeat.adding(message.request_id)
                failure = _add(core, message)
                heartbeat.adding(None)
                if failure is not None:
                    sender.send(failure)
            elif isinstance(message, AbortRequest):
                _abort(engine, frontends, [message.request_id], message.index)
            elif isinstance(message, Ask):
                _answer(engine, message, sender, inbox)
            elif isinstance(message, Answer):
                sender.send(message)
            elif isinstance(message, Joined):
                frontends.join(sender)
            elif isinstance(message, Left):
                _abort(engine, frontends, frontends.leave(sender))
            else:
                return
        heartbeat.beat(len(core.live_ids))
        _step(engine, frontends)


def _serve_and_close(engine: Engine, frontends: Frontends, inbox: Inbox, heartbeat: Heartbeat) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the owner is gone: tiers outlive it
        serve(engine, frontends, inbox, heartbeat)
    _close(engine)


def _warm_up_grammars(core: EngineCore) -> None:
    """Once the engine is idle: reading a vocabulary takes Python's lock for tenths of a second at a time."""
    if core.info.grammars is not None:
        core.info.grammars.warm_up()


def _add(core: EngineCore, message: AddRequest) -> RequestFailed | None:
    """Queue a request, or return its failure.  A request that cannot be queued does not end the engine."""
    try:
        return core.add_request(message)
    except Exception as error:
        traceback.print_exc()
        core.abort(message.request_id)  # the sequences that were queued
        text = f"internal error: the request cannot be queued: {type(error).__name__}: {error}"
        return RequestFailed(message.request_id, "INTERNAL", text)


def _abort(engine: Engine, frontends: Frontends, request_ids: Iterable[int], index: int | None = None) -> None:
    for request_id in request_ids:
        engine.core.abort(request_id, index)
    if not engine.core.has_work:
        _step(engine, frontends)  # an empty step: the metrics see the blocks return


def _step(engine: Engine, frontends: Frontends) -> None:
    core, trace = engine.core, engine.trace
    message = core.step()
    if core.only_holds and not message.stats.batch_size and not message.failed:
        time.sleep(HELD_POLL_SECONDS)  # nothing ran, and nothing runs before an outside event
        return
    start = time.monotonic()
    frontends.send_step(message)
    if trace is not None:
        trace.sent(time.monotonic() - start)


def _close(engine: Engine) -> None:
    """Close what others read, once tiers have got the KV of the last requests."""
    tiers = engine.core.info.tiers
    with contextlib.ExitStack() as closing:
        if tiers is not None:
            closing.callback(tiers.close)
        if engine.kv_events is not None:
            closing.callback(engine.kv_events.close)  # before the tiers
        if tiers is not None:
            try:
                collect_last_steps(engine.core)
            except Exception:  # what ended before it is kept
                traceback.print_exc()


def _answer(engine: Engine, ask: Ask, sender: Frontend, inbox: Inbox) -> None:
    """Send the answer, or why there is none.  One that comes late passes through the inbox: only this thread sends."""
    late = _LATE_HANDLERS.get(type(ask.question))
    if late is None:
        sender.send(_answer_of(ask, lambda: _HANDLERS[type(ask.question)](engine, ask.question)))
        return
    try:
        value = late(engine, ask.question)
    except Exception as error:
        value = Future()
        value.set_exception(error)
    value.add_done_callback(lambda done: inbox.put((sender, _answer_of(ask, done.result))))


def _answer_of(ask: Ask, value: Callable[[], Any]) -> Answer:
    """The answer, or why there is none: a question never ends the engine."""
    try:
        return Answer(ask.question_id, value())
    except ValueError as error:
        return Answer(ask.question_id, error=("INVALID_ARG", str(error)))
    except Exception as error:
        traceback.print_exc()
        return Answer(ask.question_id, error=("INTERNAL", f"{type(error).__name__}: {error}"))


def _fork_server(control: socket.socket, config: EngineConfig, idle: bool) -> tuple[int, int] | None:
    """See `serve_forks`.  Every fork starts with the imports done, and its memory is this process's until it writes."""
    from inflight.runner.warm_up import can_warm_up_further, draft_to_heat, warm_up, warm_up_further

    newly_kept = NewlyKept(config, lambda: draft_to_heat(config))

    def prepare() -> None:
        warm_up(config, idle, _run_a_token)
        import inflight.engine.assembly  # noqa: F401

    _name("inflight-spare")
    return serve_forks(control, prepare, newly_kept.any, can_warm_up_further, warm_up_further)


def _run_a_token(config: EngineConfig) -> None:
    """Do in the spare process the work of a first step, which its forks need not repeat."""
    from inflight.engine.assembly import make_core
    from inflight.runner.pipeline import make_runner

    # Without what connects, or listens: a process that waits does neither.
    config = msgspec.structs.replace(config, kv_tiers=[], kv_listen=None, kv_events_config=None)
    core = make_core(config, make_runner(config), listeners=[])
    core.add_request(AddRequest(0, [0], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)))
    while core.has_work:
        core.step()


def _name(name: str) -> None:
    """Set the name that `ps` and `top` show for this process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _configured(connection: Connection) -> EngineConfig:
    """Receive the configuration and apply the part that must precede the import of torch."""
    config = msgspec.msgpack.decode(connection.recv_bytes(), type=EngineConfig)
    # The server, the stub and clients share the cores: a thread that spins at an OpenMP barrier would
    # take a core from the thread that the barrier waits for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Before torch is imported, which would start a thread for each core of the machine.
    if config.cpu_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.cpu_threads)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(available_cpus()))
    return config


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the owner's socket pair")
    parser.add_argument("--heartbeat-fd", type=int, help="shared memory in which this process records what it does")
    parser.add_argument("--demand-fd", type=int, help="shared memory that says whether grammars are used")
    parser.add_argument("--fork-server", action="store_true", help="import everything, then fork for each request")
    parser.add_argument("--idle", action="store_true", help="with --fork-server: import on idle cores only")
    parser.add_argument("--shared", action="store_true", help="the owner sends frontends and is not one itself")
    args = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # from a terminal or a service manager: the frontend drains first
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # until settled: objects of imports and loading stay, and scanning them is a fifth of the time
    fd, heartbeat_fd = args.fd, args.heartbeat_fd
    if args.demand_fd is not None:
        share_demand(args.demand_fd)
    if args.fork_server:
        with socket.socket(fileno=os.dup(fd)) as control:
            config = _configured(Connection(fd))
            forked = _fork_server(control, config, args.idle)
        if forked is None:
            return 0  # the owner is gone
        fd, heartbeat_fd = forked
    connection = Connection(fd)
    owner = Frontend(0, connection)
    config = _configured(connection)
    slots = config.max_num_seqs
    heartbeat = Heartbeat(Heartbeat.create(slots) if heartbeat_fd is None else heartbeat_fd, slots)
    try:
        _name("inflight-engine")
        loaded = _load(owner, config, heartbeat)
        if loaded is None:
            return 1
        engine, ready = loaded
        core = engine.core
        settle_garbage_collector()
        if args.shared:
            owner.send(ready)
        inbox: Inbox = SimpleQueue()
        reads = accept_into if args.shared else read_into
        threading.Thread(target=reads, args=(inbox, owner, connection), name="reader", daemon=True).start()
        _serve_and_close(engine, Frontends(core.live_ids, ready), inbox, heartbeat)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the frontend is gone
    except Exception as error:
        traceback.print_exc()
        owner.send(EngineFailed(f"engine step failed: {type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # torch's teardown takes a second or two, and an unload would wait for it
