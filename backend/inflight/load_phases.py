"""Tells people and programs that wait for an engine what it does until it is ready.

The engine process prints a line for each phase to stderr, which is the server's log; `inflight serve` shows the latest.
In another process the lines are messages of the logger `inflight.load_phases`.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

__all__ = ["enter_phase", "print_phases"]

_log = logging.getLogger(__name__)


def enter_phase(phase: str) -> None:
    """Loading begins a phase, such as "reading the weights"."""
    _log.info("%s", phase)


def print_phases(model: str) -> None:
    """Print each phase of loading `model`, a hub id or a folder, as `inflight: loading NAME: PHASE`, and warnings."""
    name = Path(model).name.replace("%", "%%")
    _print(_log, logging.INFO, f"inflight: loading {name}: %(message)s")
    _print(logging.getLogger(__package__), logging.WARNING, "inflight: warning: %(message)s")


def _print(log: logging.Logger, level: int, form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(form))
    log.handlers = [handler]
    log.setLevel(level)
    log.propagate = False
