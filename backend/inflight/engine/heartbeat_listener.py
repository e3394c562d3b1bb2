"""Records every step in the engine's `Heartbeat` before it runs.  No torch."""

from __future__ import annotations

from inflight.engine.events import EngineListener
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.step import SchedulerOutput

__all__ = ["HeartbeatListener"]


class HeartbeatListener(EngineListener):
    """Records the sequences of each step, so that the frontend knows which ones a dead engine ran."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def step_made(self, out: SchedulerOutput) -> None:
        self._heartbeat.launched(out)
