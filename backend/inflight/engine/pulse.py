"""A runner that writes each step into the engine's `Heartbeat` before it runs.  No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inflight.engine.heartbeat import Heartbeat
from inflight.engine.step import SchedulerOutput

if TYPE_CHECKING:
    from inflight.engine.core import ModelInfo, Runner

__all__ = ["PulsingRunner"]


class PulsingRunner:
    """A `Runner` that writes down what it is about to run.

    Attributes:
        info, collect: the other runner's.
    """

    def __init__(self, runner: Runner, heartbeat: Heartbeat) -> None:
        self._runner = runner
        self._heartbeat = heartbeat
        self.info: ModelInfo = runner.info
        self.collect = runner.collect

    @property
    def num_collected_first(self) -> int:
        return getattr(self._runner, "num_collected_first", 0)

    def launch(self, out: SchedulerOutput) -> Any:
        self._heartbeat.launched(out)
        return self._runner.launch(out)
