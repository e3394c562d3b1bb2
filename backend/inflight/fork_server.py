"""The loop of a fork server: a process that has done the imports and forks into each engine process.

Imports take seconds, a fork milliseconds, and parent and forks share the memory of what was imported.  The owner
(`frontend/engine_client/fork_server_process.py`) sends one message per engine process, with the descriptors of
`ForkRequest`.  No torch here.

It says with a byte that it has done the imports (`READY`), and later, once, if a process that is made now could do more
for its forks (`OUTDATED`).  A fork of it does later work and then takes its place, so that there
are forks meanwhile.  When the owner closes the connection, it ends, but not before its forks have: it knows how.

A fork has only the thread that called it, and no usable connection to a device that its parent had opened.  So the
parent must have neither other threads nor an open device; if it has, the fork becomes a new program that does the
imports itself.  `multiprocessing.forkserver` is not used because it has one server per process with one environment,
imports at normal priority beside a running engine, and does not end its forks with the process that asked for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
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
_PR_SET_PDEATHSIG = 1
_DONE = b"d"  # between an heir and its parent
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


_HEIR = ForkRequest(-1, -1, -1, -1)  # no request


def serve_forks(
    control: socket.socket,
    prepare: Callable[[], object],
    is_outdated: Callable[[], bool] = lambda: False,
    can_do_more: Callable[[], bool] = lambda: False,
    do_more: Callable[[], object] = lambda: None,
) -> tuple[int, int] | None:
    """Run `prepare`, tell the owner that it is done, and fork for each request.

    Args:
        is_outdated: asked ever more rarely, until it answers yes: whether to do `prepare` now would be worth it.
        can_do_more: asked as often: whether there is something for `do_more` to do.
        do_more: what forks did not need at first.  Can take long: an heir does it, and this process forks meanwhile.

    Returns:
        In each fork, the descriptors of its pipe and its heartbeat; in the fork server and its heirs None, once the
        owner has closed `control` and all forks have ended.
    """
    prepare()
    obstacle = _obstacle()
    if obstacle is not None:
        print(f"engine processes do their imports themselves: {obstacle}", file=sys.stderr, flush=True)
    gc.freeze()  # without a collection: each fork would copy the pages that it frees, when it writes there
    _tell(control, READY)
    server = _ForkServer(control, is_outdated, can_do_more if obstacle is None else lambda: False)
    while (request := server.run()) is _HEIR:
        do_more()
        gc.freeze()
        server.take_over()
    if request is None:
        return None
    _become_engine(request, obstacle)
    return request.pipe, request.heartbeat


class _Heir(NamedTuple):
    """A fork that does `do_more`, as its parent sees it: its pidfd, its process id, our end of its socket."""

    pidfd: int
    pid: int
    will: socket.socket


class _ForkServer:
    """The loop, and the descriptors that it waits for.

    An heir takes over when it has done what is more: it shares all memory, unlike a new fork server.  A thread beside
    this loop could do no such thing, because what it locks stays locked in a fork.
    """

    def __init__(
        self, control: socket.socket, is_outdated: Callable[[], bool], can_do_more: Callable[[], bool]
    ) -> None:
        self._control = control
        self._is_outdated = is_outdated
        self._can_do_more = can_do_more
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> process id, report
        self._heir: _Heir | None = None
        self._will: socket.socket | None = None  # in an heir, its end
        self._is_owned, self._asks, self._pause = True, True, _ASK_SECONDS[0]
        self._listen()

    def _listen(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ, self._serve)

    def run(self) -> ForkRequest | None:
        """Returns in a fork its request; in an heir `_HEIR`; None when all is over."""
        while self._selector.get_map():
            events = self._selector.select(self._pause if self._asks else None)
            if not events and self._ask():
                return _HEIR
            for key, _ in events:
                if self._selector.get_map().get(key.fd) is not key:
                    continue  # closed by the event before
                request: ForkRequest | None = key.data()
                if request is not None:
                    return request
        return None

    def _ask(self) -> bool:
        """Tell the owner if this process is outdated, and make an heir if there is more to do; in it, return True."""
        self._pause = min(2 * self._pause, _ASK_SECONDS[1])
        self._asks = not (self._is_outdated() and _tell(self._control, OUTDATED))
        return self._heir is None and self._can_do_more() and self._make_heir()

    def _serve(self) -> ForkRequest | None:
        request = _receive(self._control)
        if request is None:
            self._is_owned = self._asks = False
            self._selector.unregister(self._control)
            if self._heir is not None:
                os.kill(self._heir.pid, signal.SIGKILL)
            return None
        pidfd = _fork(request, self._children)
        if pidfd is None:
            self._close_what_is_of_the_parent()
            self._control.close()
            return request
        if pidfd >= 0:
            self._selector.register(pidfd, selectors.EVENT_READ, functools.partial(self._report_end, pidfd))
        return None

    def _report_end(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        _report_end(pidfd, *self._children.pop(pidfd))

    def _make_heir(self) -> bool:
        """True in the heir."""
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = socket.socketpair()
        pid, parent = -1, os.getpid()
        try:
            pid = os.fork()
            if not pid:
                _die_with_parent(parent)
                ours.close()
                _close_all(self._children)
                self._children.clear()
                self._close_what_is_of_the_parent()
                self._will = theirs
                return True
            self._heir = heir = _Heir(os.pidfd_open(pid), pid, ours)
        except OSError:  # no room, or no pidfds
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            ours.close()
            self._can_do_more = lambda: False
            return False
        finally:
            if pid:
                theirs.close()
        self._selector.register(heir.will, selectors.EVENT_READ, functools.partial(self._hand_over, heir))
        self._selector.register(heir.pidfd, selectors.EVENT_READ, functools.partial(self._forget, heir))
        return False

    def _close_what_is_of_the_parent(self) -> None:
        self._selector.close()
        if self._heir is not None:
            os.close(self._heir.pidfd)
            self._heir.will.close()
            self._heir = None

    def take_over(self) -> None:
        """In an heir: wait until the parent receives no more requests, and receive them."""
        assert self._will is not None
        with self._will as will:
            will.sendall(_DONE)
            will.recv(1)
        self._will = None
        self._listen()

    def _hand_over(self, heir: _Heir) -> None:
        self._selector.unregister(heir.will)
        with contextlib.suppress(OSError):  # it has ended, as its pidfd will tell
            if heir.will.recv(1) and self._is_owned:
                self._selector.unregister(self._control)
                self._asks = False
                heir.will.sendall(_DONE)

    def _forget(self, heir: _Heir) -> None:
        """It has ended because the owner has gone; or it was killed, and this process forks again."""
        for descriptor in (heir.pidfd, heir.will):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        os.waitpid(heir.pid, 0)
        os.close(heir.pidfd)
        heir.will.close()
        self._heir, self._can_do_more, self._asks = None, lambda: False, self._is_owned
        if self._is_owned and self._control not in self._selector.get_map():
            self._selector.register(self._control, selectors.EVENT_READ, self._serve)


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _close_all(children: dict[int, tuple[int, int]]) -> None:
    """In a fork: close the pidfds and reports of the forks before it."""
    for pidfd, (_, report) in children.items():
        os.close(pidfd)
        os.close(report)


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
            _close_all(children)
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
