"""The requests of a trace in completion-locked batches: computed, not measured.

A batch forms from the queue, in order of arrival, once `batch_size` requests wait or the oldest has
waited `queue_delay` (Triton's dynamic batcher with a preferred size); batches run one at a time.
Prompts are padded to the longest, then every slot decodes until the longest output is complete; a slot
whose sequence has ended idles.  A step costs what the traced engine's own steps cost, by a linear fit,
so the two pictures differ in batching alone.  The engine's steps for the same requests get their cost from the
same fit, and time without a step or a batch counts for neither: requests that come one by one cost both the same.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from inflight.engine.policies.cost_model import StepCost, StepLoad
from inflight_tools.least_squares import nonnegative_least_squares
from inflight_tools.trace.timeline import Timeline

__all__ = [
    "StaticBatch",
    "StaticRequest",
    "StaticSchedule",
    "StaticSlot",
    "fit_step_cost",
    "schedule_static",
    "seconds_of_steps",
]

_HICCUP_QUANTILE = 0.99  # longer steps are hiccups of the machine, not a cost


@dataclass(frozen=True, slots=True)
class StaticRequest:
    """A sequence as the batcher sees it: `arrival` in seconds, lengths in tokens; `prompt` without what was cached."""

    label: str
    arrival: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class StaticSlot:
    """A row of a batch: busy until `busy_end`, then idle until the end of the batch."""

    label: str
    output: int
    busy_end: float


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """Padded prompts from `start` to `prefill_end`, then decode steps until `end`; times in seconds.

    Attributes:
        iterations: tokens of the longest output; the first one comes with the prefill.
    """

    start: float
    prefill_end: float
    end: float
    iterations: int
    slots: list[StaticSlot]


@dataclass(frozen=True, slots=True)
class StaticSchedule:
    """All batches.

    Attributes:
        batch_size: slots of a batch.
    """

    batch_size: int
    batches: list[StaticBatch]

    @property
    def end(self) -> float:
        return self.batches[-1].end if self.batches else 0.0

    @property
    def seconds(self) -> float:
        """Time in which a batch ran."""
        return sum(batch.end - batch.start for batch in self.batches)

    @property
    def idle_share(self) -> float:
        """Share of the iterations of occupied slots in which the slot's sequence had ended, 0 to 1.

        Slots that were empty because too few requests had arrived do not count.
        """
        offered = sum(len(batch.slots) * batch.iterations for batch in self.batches)
        used = sum(slot.output for batch in self.batches for slot in batch.slots)
        return 1 - used / offered if offered else 0.0


def schedule_static(
    requests: list[StaticRequest], cost: StepCost, *, batch_size: int = 8, queue_delay: float = 0.1
) -> StaticSchedule:
    """Batch `requests`, which are in order of arrival.

    Args:
        cost: of a step; its context and attention terms are not used.
        batch_size: slots of a batch.
        queue_delay: seconds that the oldest request waits for a batch to fill.
    """
    batches: list[StaticBatch] = []
    free, first = 0.0, 0
    while first < len(requests):
        full = requests[first + batch_size - 1].arrival if first + batch_size <= len(requests) else float("inf")
        start = max(free, min(full, requests[first].arrival + queue_delay))
        taken = [request for request in requests[first : first + batch_size] if request.arrival <= start]
        first += len(taken)
        width, iterations = max(request.prompt for request in taken), max(request.output for request in taken)
        prefill_end = start + cost.seconds(StepLoad(prefills=len(taken), prefill_tokens=width * len(taken)))
        step = cost.seconds(StepLoad(decodes=len(taken)))
        free = prefill_end + (iterations - 1) * step
        slots = [StaticSlot(some.label, some.output, prefill_end + (some.output - 1) * step) for some in taken]
        batches.append(StaticBatch(start, prefill_end, free, iterations, slots))
    return StaticSchedule(batch_size, batches)


def fit_step_cost(timeline: Timeline) -> StepCost:
    """Least squares over the traced steps: a fixed cost, one per sequence and one per prompt token."""
    steps = timeline.steps
    design = np.array([[1, len(step.keys), tokens] for step, tokens in zip(steps, timeline.prefill_tokens)], float)
    # The engine sends a step's tokens before it schedules the next one, so sending is part of the cost.
    seconds = np.array([step.end + step.send - step.start for step in steps])
    kept = seconds <= np.quantile(seconds, _HICCUP_QUANTILE)
    fixed, per_sequence, per_token = map(float, nonnegative_least_squares(design[kept], seconds[kept]))
    return StepCost.linear(fixed, per_sequence=per_sequence, per_prefill_token=per_token)


def seconds_of_steps(timeline: Timeline, labels: Container[str], cost: StepCost) -> float:
    """Seconds that the traced engine's steps cost for the sequences with these labels."""
    loads: dict[int, list[int]] = {}  # step -> prefills, tokens of them, decodes
    for row in timeline.rows:
        for piece in row.slices if row.label in labels else ():
            if piece.step is not None:
                load = loads.setdefault(piece.step, [0, 0, 0])
                if piece.kind == "prefill":
                    load[0], load[1] = load[0] + 1, load[1] + piece.tokens - piece.drafts + piece.accepted
                else:
                    load[2] += 1
    return sum(
        cost.seconds(StepLoad(prefills=prefills, prefill_tokens=tokens, decodes=decodes))
        for prefills, tokens, decodes in loads.values()
    )
