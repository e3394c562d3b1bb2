"""Tells people and programs that wait for an engine what it does until it is ready.

The engine process prints a line for each phase to stderr, which is the server's log; `inflight serve` shows the latest.
In another process the lines are messages of the logger `inflight.load_phases`, and a terminal shows the latest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

__all__ = ["enter_phase", "print_phases", "show_phases"]

_log = logging.getLogger(__name__)


def enter_phase(phase: str) -> None:
    """Loading begins a phase, such as "reading the weights"."""
    _log.info("%s", phase)


def print_phases(model: str) -> None:
    """Print each phase of loading `model`, a hub id or a folder, as `inflight: loading NAME: PHASE`, and warnings."""
    name = Path(model).name.replace("%", "%%")
    _print(_log, logging.INFO, f"inflight: loading {name}: %(message)s")
    _print(logging.getLogger(__package__), logging.WARNING, "inflight: warning: %(message)s")


@contextlib.contextmanager
def show_phases(model: str) -> Iterator[None]:
    """Show the present phase of loading `model` in a line of the terminal that standard error is, until the block ends.

    Nothing is shown elsewhere, or where the program handles these messages itself, or has rich show something, which
    would make a permanent line of each write.
    """
    stream = sys.stderr
    if not _takes_a_line(stream) or _log.isEnabledFor(logging.INFO):
        yield
        return
    handler, level, propagate = _TerminalLine(stream, model), _log.level, _log.propagate
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False
    try:
        handler.show("starting")
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)
        _log.propagate = propagate
        handler.show(None)


def _takes_a_line(stream: TextIO | None) -> bool:
    if stream is None or hasattr(stream, "rich_proxied_file") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


class _TerminalLine(logging.Handler):
    """The cursor stays at the beginning of the line, so that what others print is written over it."""

    def __init__(self, stream: TextIO, model: str) -> None:
        super().__init__()
        self._stream = stream
        self._name = Path(model).name

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage())

    def show(self, phase: str | None) -> None:
        from rich.cells import cell_len, set_cell_size  # what only prints to a log does without it

        line = "" if phase is None else f"loading {self._name}: {phase}"
        line = set_cell_size(line, min(cell_len(line), shutil.get_terminal_size().columns - 1))
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone; the load goes on
            self._stream.write(f"\r\x1b[K{line}\r")
            self._stream.flush()


def _print(log: logging.Logger, level: int, form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(form))
    log.handlers = [handler]
    log.setLevel(level)
    log.propagate = False
