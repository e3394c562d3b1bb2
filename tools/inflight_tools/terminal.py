"""A command in a terminal: stop signals, one-line errors, a log on stderr."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from inflight_tools.installation import LauncherError

__all__ = ["echo_file", "fail", "one_line_errors", "stop_signals"]


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, and Ctrl-C as success once everything has stopped."""

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
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


@contextlib.contextmanager
def echo_file(path: Path, start: int) -> Iterator[None]:
    """Copy a growing file to stderr from byte `start` while the context is open, and the rest of it on exit."""
    done = threading.Event()

    def copy() -> None:
        with open(path, "rb") as source:
            source.seek(start)
            while True:
                last = done.is_set()
                sys.stderr.buffer.write(source.read())
                sys.stderr.flush()
                if last:
                    return
                done.wait(0.1)

    thread = threading.Thread(target=copy, name="log-echo", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
