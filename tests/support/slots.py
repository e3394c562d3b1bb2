"""Which request holds which slot, learned as a runner learns it: from new rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inflight.engine.step import SchedulerOutput


@dataclass
class SeenStep:
    """A step and its requests; all other attributes are those of the step.

    Attributes:
        requests: one per row, in order: (request id, index), or a test's replacement.
        preempted: the requests that lost their slots.
    """

    out: SchedulerOutput = field(default_factory=SchedulerOutput)
    requests: list[Any] = field(default_factory=list)
    preempted: list[Any] = field(default_factory=list)

    @property
    def request_ids(self) -> list[int]:
        return [request_id for request_id, _ in self.requests]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)


class SlotOwners:
    """Sees every step in order and names the requests of its rows."""

    def __init__(self) -> None:
        self._owner: dict[int, tuple[int, int]] = {}

    def see(self, out: SchedulerOutput) -> SeenStep:
        preempted = [self._owner[slot] for slot in out.preempted]
        self._owner.update({row.slot: (row.request_id, row.index) for row in out.new_rows})
        return SeenStep(out, [self._owner[slot] for slot in out.slots], preempted)
