"""The cost of computing KV again that was lost to preemption.  Pure Python, no torch."""

from __future__ import annotations

from inflight.engine.events import DoneStep
from inflight.engine.policies.cost_model import OnlineStepCost, step_load

__all__ = ["LearnedRecomputeCost"]


class LearnedRecomputeCost:
    """Implements `RecomputeCost`: learns from the device's time for steps without copies to or from the host."""

    def __init__(self) -> None:
        self._model = OnlineStepCost()

    def seconds(self, start: int, end: int) -> float:
        return self._model.cost.recompute_seconds(start, end)

    def step_done(self, step: DoneStep) -> None:
        out = step.out
        if not (out.swap_out or out.swap_in):
            self._model.observe(step_load(out), step.result.ended - step.result.started)
