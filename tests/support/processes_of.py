"""The processes of a running server."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import psutil

from inflight_client import Client
from inflight_tools.launcher import TritonServer
from inflight_tools.processes import STUB_NAME, children
from inflight_tools.sweeper import session_members

_TRIES = 30
_SECONDS = 100.0  # well within pytest's timeout, which would not say what has failed
T = TypeVar("T")


def tries() -> Iterator[int]:
    """Numbers of the tries of an interruption, which can come too late; two at least, however long they take."""
    end = time.monotonic() + _SECONDS
    for number in range(_TRIES):
        if number > 1 and time.monotonic() > end:
            return
        yield number


def pipes_and_sockets(pid: int) -> set[str]:
    """The pipes and sockets that a process keeps open while it runs; files come and go."""
    links = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # a file, closed since
            links.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {link for link in links if link.startswith(("pipe:", "socket:"))}


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def members_with(session: int, part: bytes) -> list[int]:
    """Process ids of a session's members whose command lines contain `part`; others may end meanwhile."""
    found = []
    for pid in session_members(session):
        with contextlib.suppress(OSError):  # it has ended
            found += [pid] * (part in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def stubs(server: TritonServer, model: str | None = None) -> list[int]:
    """Process ids of a model's stubs, or of all models' stubs; a dead stub that Triton has not reaped has no model."""
    assert server.process is not None
    return [pid for pid in children(server.process.pid, STUB_NAME) if model is None or _model_of(pid) == model]


def _model_of(stub: int) -> str | None:
    """A stub's first argument is REPOSITORY/MODEL/VERSION/model.py, even if that file does not exist."""
    with contextlib.suppress(psutil.Error, IndexError):
        return Path(psutil.Process(stub).cmdline()[1]).parts[-3]
    return None


def model_processes(server: TritonServer, model: str | None = None) -> list[psutil.Process]:
    """The stubs of a model, or of all models, and what these have started."""
    assert server.process is not None
    return [process for root in stubs(server, model) for process in _family(root)]


def _family(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)


def engine_processes(server: TritonServer, model: str | None = None) -> list[psutil.Process]:
    """Engine processes of a model, or of all models, that have loaded a checkpoint or are about to.

    Found by the name that a worker gives itself: a process that is still importing has none, and a spare one has
    another.
    """
    found = []
    for process in model_processes(server, model):
        with contextlib.suppress(psutil.Error):
            if process.name() == "inflight-engine":
                found.append(process)
    return found


def engine_process(server: TritonServer, model: str | None = None) -> psutil.Process:
    """The only one; raises ValueError unless there is exactly one."""
    (engine,) = engine_processes(server, model)
    return engine


def run_in_turns(engine: psutil.Process, done: Callable[[float], bool], seconds: float = 0.002) -> None:
    """Let a process run for moments until `done` returns true, and leave it stopped; it can be stopped before.

    A client whose machine is busy catches up meanwhile, because the pauses become longer, and mostly sees the first
    response long before a request ends.
    No test may rely on that, because a turn can oversleep: if requests ended before the engine was stopped
    (`open_when_stopped`), the test tries again (`tries`).

    Args:
        done: waits up to so many seconds, and returns whether the process has run for long enough.
        seconds: of a turn.
    """
    engine.suspend()
    pause = 0.05
    while not done(pause):
        engine.resume()
        time.sleep(seconds)
        engine.suspend()
        pause = min(1.5 * pause, 0.5)


@contextlib.contextmanager
def begins_in_turns(engine: psutil.Process) -> Iterator[threading.Event]:
    """The engine runs in turns until the event is set, and is stopped when the context ends."""
    begun = threading.Event()
    turns = threading.Thread(target=run_in_turns, args=(engine, begun.wait))
    turns.start()
    try:
        yield begun
    finally:
        begun.set()
        turns.join()


def open_when_stopped(client: Client, num_stubs: int = 1, key: str | None = None) -> int:
    """Open requests of a model whose engine is stopped, once its frontends have sent all that the engine had said.

    Args:
        num_stubs: of the model; Triton chooses which one answers.
        key: the admin key, if the model has one.
    """

    def look() -> dict[int, tuple[int, int]]:
        """Open requests and generated tokens, by process id of the stub."""
        seen = {}
        while len(seen) < num_stubs:
            now = json.loads(client.control("stats", admin_key=key))["frontend"]
            seen[now["pid"]] = now["open_requests"], now["generation_tokens"]
        return seen

    before, now = look(), look()
    while now != before:
        before, now = now, look()
    return sum(count for count, _ in now.values())


def call_in_turns(engine: psutil.Process, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The result of a call that waits for the process, which runs in turns meanwhile and is left stopped."""
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(function, *args, **kwargs)
        run_in_turns(engine, lambda seconds: bool(wait([answer], seconds).done))
        return answer.result()


@contextlib.contextmanager
def stopped(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Processes that do not run within the context."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@contextlib.contextmanager
def slowed(process: psutil.Process, runs: float = 0.005, pauses: float = 0.02) -> Iterator[None]:
    """Let a process run for moments only within the context: so many seconds, and then so many not."""
    over = threading.Event()

    def turns() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # the test has killed it
            while not over.is_set():
                process.suspend()
                over.wait(pauses)
                process.resume()
                over.wait(runs)

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
