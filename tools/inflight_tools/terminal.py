"""A command in a terminal: stop signals, one-line errors."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import typer

from inflight_tools.installation import LauncherError

__all__ = ["StopRequest", "fail", "like_ctrl_c", "one_line_errors", "stop_signals"]


class StopRequest:
    """Counts stop signals: one to stop in order, a second one to end at once.

    Its handler raises KeyboardInterrupt wherever the main thread is.  In a finaliser that the garbage collector
    runs Python drops the exception, so code that waits in a loop calls `check` or `check_again`, too.  Further
    signals have no effect: what is left to do then is quick, and must be done.
    """

    def __init__(self) -> None:
        self._came = 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if a stop signal has come."""
        if self._came:
            raise KeyboardInterrupt

    def check_again(self) -> None:
        """Raise KeyboardInterrupt if a second stop signal has come."""
        if self._came > 1:
            raise KeyboardInterrupt

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self._came += 1
        if self._came <= 2:
            raise KeyboardInterrupt


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, and Ctrl-C as success once everything has stopped."""
    with like_ctrl_c() as stop:
        try:
            yield stop
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)


@contextlib.contextmanager
def like_ctrl_c() -> Iterator[StopRequest]:
    """Treat SIGTERM and SIGHUP like Ctrl-C."""
    stop = StopRequest()
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a LauncherError into one line and an exit status."""
    try:
        yield
    except LauncherError as error:
        fail(str(error), error.status)


def fail(message: str, status: int = 1) -> NoReturn:
    """Exit with one line on stderr."""
    typer.echo(f"inflight: {message}", err=True)
    raise typer.Exit(status)
