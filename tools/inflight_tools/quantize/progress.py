"""How far a run is, on a terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["Shown"]


class Shown:
    """One line on stderr that changes; nothing without a terminal, or if it is not wanted.

    Args:
        console: of stderr.
    """

    def __init__(self, wanted: bool, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._seconds: list[float] = []  # of the layers of this run
        self._begun = 0.0
        self._progress: Progress | None = None
        if wanted and console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task("reading the checkpoint")
            self._progress.start()

    def phase(self, text: str) -> None:
        """The present work, if it is no layer."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def layer(self, index: int, total: int) -> None:
        """The layer `index` of `total` begins, and the one before it has ended."""
        now = time.monotonic()
        if self._begun:
            self._seconds.append(now - self._begun)
        self._begun = now
        text = f"layer {index + 1} of {total}"
        if self._seconds:
            each = sum(self._seconds) / len(self._seconds)
            text += f", {each:.1f} s a layer, {_span(each * (total - index))} left"
        self.phase(text)

    def end(self) -> None:
        """Remove the line; safe to repeat."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
