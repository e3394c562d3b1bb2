"""The same requests, batched the completion-locked way: computed, not measured.

A batch forms from what waits, in order of arrival, when `batch_size` wait or the oldest has waited
`queue_delay` (Triton's dynamic batcher with a preferred size), one batch at a time.  Prompts are
padded to the longest, then all slots decode until the longest output is complete; a slot whose
sequence has ended idles.  Steps cost what the traced engine's own steps cost, by a linear fit, so
that the two pictures differ in the batching and in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from inflight_tools.trace.timeline import Timeline

__all__ = ["Job", "StaticBatch", "StaticSchedule", "StaticSlot", "StepCost", "fit_step_cost", "schedule_static"]


@dataclass(frozen=True, slots=True)
class Job:
    """A sequence as a batcher sees it; tokens, and seconds for the arrival."""

    label: str
    arrival: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: `fixed + per_decode * decoded tokens + per_prefill * prompt tokens`."""

    fixed: float
    per_decode: float
    per_prefill: float

    def seconds(self, decodes: int, prefills: int) -> float:
        return self.fixed + self.per_decode * decodes + self.per_prefill * prefills


@dataclass(frozen=True, slots=True)
class StaticSlot:
    """A row of a batch: busy to `busy_end`, idle from there to the batch's end."""

    label: str
    output: int
    busy_end: float


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """From `start` to `prefill_end` the padded prompts, then `iterations` decode steps to `end`."""

    start: float
    prefill_end: float
    end: float
    iterations: int
    slots: list[StaticSlot]


@dataclass(frozen=True, slots=True)
class StaticSchedule:
    """All batches.

    Attributes:
        batch_size: slots of a batch; a smaller batch leaves some empty, which count as idle.
    """

    batch_size: int
    batches: list[StaticBatch]

    @property
    def end(self) -> float:
        return self.batches[-1].end if self.batches else 0.0

    @property
    def idle_share(self) -> float:
        """Share of slot-iterations in which a slot had nothing to decode, 0 to 1."""
        offered = sum(self.batch_size * batch.iterations for batch in self.batches)
        used = sum(slot.output for batch in self.batches for slot in batch.slots)
        return 1 - used / offered if offered else 0.0


def schedule_static(
    jobs: list[Job], cost: StepCost, *, batch_size: int = 8, queue_delay: float = 0.1
) -> StaticSchedule:
    """Batches of `jobs`, which stand in order of arrival.  The first token comes with the prefill."""
    batches: list[StaticBatch] = []
    free, first = 0.0, 0
    while first < len(jobs):
        full = jobs[first + batch_size - 1].arrival if first + batch_size <= len(jobs) else float("inf")
        start = max(free, min(full, jobs[first].arrival + queue_delay))
        taken = [job for job in jobs[first : first + batch_size] if job.arrival <= start]
        first += len(taken)
        width, iterations = max(job.prompt for job in taken), max(job.output for job in taken)
        prefill_end = start + cost.seconds(0, width * len(taken))
        step = cost.seconds(len(taken), 0)
        free = prefill_end + (iterations - 1) * step
        slots = [StaticSlot(job.label, job.output, prefill_end + (job.output - 1) * step) for job in taken]
        batches.append(StaticBatch(start, prefill_end, free, iterations, slots))
    return StaticSchedule(batch_size, batches)


def fit_step_cost(timeline: Timeline) -> StepCost:
    """Least squares over the traced steps, no coefficient below zero."""
    steps = timeline.steps
    design = np.array([[1, d, p] for d, p in zip(timeline.decode_tokens, timeline.prefill_tokens)], dtype=float)
    # To the next step where that follows at once: what the loop does between steps belongs to them.
    seconds = np.array([step.end + step.send - step.start for step in steps])
    # The steps are cut off at the 99th percentile: a hiccup of the machine is not a cost.
    kept = seconds <= np.quantile(seconds, 0.99)
    design, seconds = design[kept], seconds[kept]
    best, least = (float(seconds.mean()), 0.0, 0.0), np.inf
    for count in (1, 2, 3):
        for columns in combinations(range(3), count):
            part = design[:, columns]
            found, _, rank, _ = np.linalg.lstsq(part, seconds, rcond=None)
            error = float(((part @ found - seconds) ** 2).sum())
            if rank == count and (found >= 0).all() and error < least * (1 - 1e-9):
                coefficients = np.zeros(3)
                coefficients[list(columns)] = found
                best, least = tuple(map(float, coefficients)), error  # type: ignore[assignment]
    return StepCost(*best)
