"""The loop of a fork server: a process that has done the imports and forks into each engine process.

Imports take seconds, a fork milliseconds, and parent and forks share the memory of what was imported.  The owner
(`frontend/engine_client/fork_server_process.py`) sends one message per engine process, with the descriptors of
`ForkRequest`.  No torch here.

It says with a byte that it has done the imports (`READY`), and later, once, if a process that is made now could do more
for its forks (`OUTDATED`).  When the owner closes the connection, it ends, but not before its forks have: it knows how.

A fork has only the thread that called it, and no usable connection to a device that its parent had opened.  So the
parent must have neither other threads nor an open device; if it has, the fork becomes a new program that does the
imports itself.  `multiprocessing.forkserver` is not used because it has one server per process with one environment,
imports at normal priority beside a running engine, and does not end its forks with the process that asked for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["OUTDATED", "READY", "ForkRequest", "serve_forks"]

READY, OUTDATED = b"r", b"o"

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_ASK_SECONDS = 1.0, 10.0  # between two questions whether it is outdated: at first, and at last
_THREADS_END_SECONDS = 1.0  # a thread that has been joined is in the process's list for a moment longer


class ForkRequest(NamedTuple):
    """The descriptors that come with a request for an engine process.

    Attributes:
        pipe: the engine's end of its socket pair.
        heartbeat: shared memory in which it records what it does.
        owner: of a pipe that the owner never writes to; when its other end closes, the engine process is killed.
        report: a socket; receives the process id as text with a pidfd, or the reason why there is no process; and when
            the process has ended, its status as text, as `os.waitstatus_to_exitcode` returns it.
    """

    pipe: int
    heartbeat: int
    owner: int
    report: int


def serve_forks(
    control: socket.socket, prepare: Callable[[], object], is_outdated: Callable[[], bool] = lambda: False
) -> tuple[int, int] | None:
    """Run `prepare`, tell the owner that it is done, and fork for each request.

    Args:
        is_outdated: asked ever more rarely, until it answers yes: whether to do `prepare` now would be worth it.

    Returns:
        In each fork, the descriptors of its pipe and its heartbeat; in the fork server None, once the owner has closed
        `control` and all forks have ended.
    """
    prepare()
    obstacle = _obstacle()
    if obstacle is not None:
        print(f"engine processes do their imports themselves: {obstacle}", file=sys.stderr, flush=True)
    gc.freeze()  # without a collection: each fork would copy the pages that it frees, when it writes there
    _tell(control, READY)
    asks, pause = True, _ASK_SECONDS[0]
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        children: dict[int, tuple[int, int]] = {}  # pidfd -> process id, report
        while selector.get_map():
            events = selector.select(pause if asks else None)
            if not events:
                pause = min(2 * pause, _ASK_SECONDS[1])
                asks = not (is_outdated() and _tell(control, OUTDATED))
            for key, _ in events:
                if key.fileobj is not control:
                    selector.unregister(key.fd)
                    _report_end(key.fd, *children.pop(key.fd))
                    continue
                request = _receive(control)
                if request is None:
                    asks = False
                    selector.unregister(control)
                    continue
                pidfd = _fork(request, children)
                if pidfd is None:
                    control.close()
                    _become_engine(request, obstacle)
                    return request.pipe, request.heartbeat
                if pidfd >= 0:
                    selector.register(pidfd, selectors.EVENT_READ)
    return None


def _tell(control: socket.socket, what: bytes) -> bool:
    with contextlib.suppress(OSError):  # the owner is gone
        control.sendall(what)
    return True


def _receive(control: socket.socket) -> ForkRequest | None:
    try:
        data, descriptors, _, _ = socket.recv_fds(control, 1, len(ForkRequest._fields), socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    return ForkRequest(*descriptors) if data else None


def _fork(request: ForkRequest, children: dict[int, tuple[int, int]]) -> int | None:
    """Fork, tell the owner, and note the child; returns its pidfd, -1 if there is no child, None in the child."""
    sys.stdout.flush()
    sys.stderr.flush()
    pidfd, pid = -1, -1
    try:
        pid = os.fork()
        if not pid:
            for other, (_, report) in children.items():
                os.close(other)
                os.close(report)
            os.close(request.report)
            return None
        pidfd = os.pidfd_open(pid)
        children[pidfd] = pid, os.dup(request.report)
        answer, sent = str(pid), [pidfd]
    except OSError as error:
        answer, sent = str(error), []
        if pid > 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for descriptor in (request.pipe, request.heartbeat, request.owner):
        os.close(descriptor)
    with socket.socket(fileno=request.report) as pipe, contextlib.suppress(OSError):  # the owner may be gone
        socket.send_fds(pipe, [answer.encode()], sent)
    return pidfd


def _report_end(pidfd: int, pid: int, report: int) -> None:
    os.close(pidfd)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with socket.socket(fileno=report) as pipe, contextlib.suppress(OSError):
        pipe.sendall(str(status).encode())


def _obstacle() -> str | None:
    """Why a fork of this process could not be an engine process; None if it can be one."""
    pid = os.fork()  # before a fork, libraries that expect one (OpenBLAS) end their threads
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + _THREADS_END_SECONDS
    while (threads := _other_threads()) and time.monotonic() < deadline:
        time.sleep(0.005)
    if threads:
        return f"the imports have started threads: {', '.join(threads)}"
    device = _open_device()
    return None if device is None else f"the imports have opened {device}"


def _other_threads() -> list[str]:
    """The names of this process's threads, without the main one."""
    names = []
    for thread in sorted(Path("/proc/self/task").iterdir()):
        with contextlib.suppress(OSError):  # it has ended
            if int(thread.name) != os.getpid():
                names.append((thread / "comm").read_text().strip())
    return names


def _open_device() -> str | None:
    """The path of an open accelerator."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder
            path = os.readlink(descriptor)
            if path.startswith(_DEVICES):
                return path
    return None


def _become_engine(request: ForkRequest, obstacle: str | None) -> None:
    """In a fork: end with the owner, and draw other random numbers than the next fork."""
    _end_with(request.owner)
    if obstacle is not None:
        arguments = sys.orig_argv[: sys.orig_argv.index("--fork-server")]
        for descriptor in (request.pipe, request.heartbeat, request.owner):
            os.set_inheritable(descriptor, True)
        os.execv(sys.executable, [*arguments, "--fd", str(request.pipe), "--heartbeat-fd", str(request.heartbeat)])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's `random` does it by itself


def _end_with(owner: int) -> None:
    """Have the kernel send SIGKILL to this process when the other end of a pipe closes.

    PR_SET_PDEATHSIG would end it with the fork server instead.
    """
    fcntl.fcntl(owner, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(owner, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(owner, fcntl.F_SETFL, fcntl.fcntl(owner, fcntl.F_GETFL) | os.O_ASYNC)
    hung_up = select.poll()
    hung_up.register(owner)
    if hung_up.poll(0):  # before the call above
        os._exit(1)
