"""Who sits in which slot, learned as a runner learns it: from the rows that enter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inflight.engine.step import SchedulerOutput


@dataclass
class SeenStep:
    """A step and the requests that it speaks of; everything else is the step's own.

    Attributes:
        requests: of its rows, in their order: (request id, index), or what stands for these.
        preempted: those that lost their slots.
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
    """Shown every step in order, says whose rows it has."""

    def __init__(self) -> None:
        self._owner: dict[int, tuple[int, int]] = {}

    def see(self, out: SchedulerOutput) -> SeenStep:
        preempted = [self._owner[slot] for slot in out.preempted]
        self._owner.update({row.slot: (row.request_id, row.index) for row in out.new_rows})
        return SeenStep(out, [self._owner[slot] for slot in out.slots], preempted)
