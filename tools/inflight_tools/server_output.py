"""A server's log as a terminal shows it: one line of progress until the server is ready, then what goes wrong.

The log itself has a hundred lines before a server is ready, and they are alike for every server.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["ServerOutput"]

_PHASE = re.compile(r"inflight: loading (.*)")
_LOADING = re.compile(r'I\d{4} .*\] "loading: (.+):\d+"')
_LOADED = re.compile(r"I\d{4} .*\] \"successfully loaded '(.+)'\"")
# tqdm's bar of a download: name, percentage, "120M/988M", and the rate.
_DOWNLOAD = re.compile(r"(\S.*?):\s+(\d+)%\|[^|]*\|\s*(\S+)/(\S+) \[")
_INFORMATION = re.compile(r"I\d{4} |[+|]|inflight: loading |Signal \(\d+\) received\.")
_STEP_PERCENT = 10  # of a download, between two plain lines


class ServerOutput:
    """Shows a server's log on stderr, or what matters of it; without a terminal each phase of loading is a line.

    Args:
        verbose: show the whole log instead.
        console: of stderr.
    """

    def __init__(self, verbose: bool = False, console: Console | None = None) -> None:
        self._verbose = verbose
        self._console = console or Console(stderr=True)
        self._path: Path | None = None
        self._position = 0
        self._rest = b""  # the beginning of a line
        self._is_ready = False
        self._shown = ""
        self._progress: Progress | None = None

    def follow(self, path: Path) -> None:
        """The log of a server that has been started."""
        self._path = path
        if not self._verbose and self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("starting tritonserver")
            self._progress.start()

    def look(self) -> None:
        """Show what has come; called again and again."""
        if self._path is not None and self._path.exists():
            with open(self._path, "rb") as log:
                log.seek(self._position)
                self._take(log.read())

    def ready(self) -> None:
        """The server is ready: from now on show warnings and errors."""
        self.look()
        self._end_progress()
        self._is_ready = True

    def finish(self, log: bytes) -> None:
        """The server has ended, and this was its whole log.  Safe to repeat."""
        self._take(log[self._position :])
        self._end_progress()

    def keep(self, log: bytes) -> None:
        """Leave the log of a server that failed in a file, and say where; the terminal has it with `verbose`."""
        self._end_progress()
        if self._verbose or not log:
            return
        descriptor, path = tempfile.mkstemp(prefix="inflight-", suffix=".log")
        with os.fdopen(descriptor, "wb") as file:
            file.write(log)
        typer.echo(f"inflight: the server's log is in {path}", err=True)

    def _take(self, new: bytes) -> None:
        self._position += len(new)
        if self._verbose:
            sys.stderr.buffer.write(new)
            sys.stderr.flush()
            return
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + new)
        for line in lines:
            self._show(line.decode(errors="replace").strip())

    def _show(self, line: str) -> None:
        if not self._is_ready:
            phase, shown = _phase(line)
            if self._progress is not None and phase:
                self._progress.update(self._task, description=escape(phase))
            elif phase and shown != self._shown:
                self._shown = shown
                self._print(phase)
            if line.startswith("inflight: warning: "):
                self._print(line)
        elif line and not _INFORMATION.match(line):
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _end_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _phase(line: str) -> tuple[str, str]:
    """The server's present phase, by a line of its log; and a key that changes when a plain line is due."""
    if (found := _LOADING.match(line)) is not None:
        phase = f"{found[1]}: starting its process"
    elif (found := _LOADED.match(line)) is not None:
        phase = f"{found[1]}: loaded"
    elif (found := _PHASE.match(line)) is not None:
        phase = found[1]
    elif (found := _DOWNLOAD.match(line)) is not None:
        path, percent, done, total = found.groups()
        name = path.rpartition("/")[2]
        return f"downloading {name}: {done} of {total} ({percent}%)", f"{name} {int(percent) // _STEP_PERCENT}"
    else:
        return "", ""
    return phase, phase
