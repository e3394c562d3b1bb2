"""A page of memory in which the engine process shows that it is alive, and which sequences it runs.  No torch.

The process that started it reads the page when no step has come for long, and after its death.  Writing costs
nanoseconds: nothing for a token, one addition a step, one word for a sequence that enters a slot.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

from inflight.engine.step import SchedulerOutput

if TYPE_CHECKING:
    from inflight.engine.core import ModelInfo, Runner

__all__ = ["Pulse", "PulsingRunner"]

_BEATS, _TAKING, _TOKENS, _LIVE, _SLOTS = 0, 1, 2, 3, 4  # words of 64 bits; from `_SLOTS` on one for each slot
_INDEX_BITS = 8  # n is at most 128


class Pulse:
    """The page.  One process writes, others read; every word is written at once.

    Args:
        descriptor: of the shared memory; the caller keeps it.
        slots: most sequences that run at the same time.
    """

    def __init__(self, descriptor: int, slots: int) -> None:
        self._words = memoryview(mmap.mmap(descriptor, self.size(slots))).cast("Q")

    @staticmethod
    def size(slots: int) -> int:
        """Bytes of a page."""
        return 8 * (_SLOTS + slots)

    @staticmethod
    def create(slots: int) -> int:
        """A descriptor of new shared memory, all zero, which is gone when nobody has it any more."""
        descriptor = os.memfd_create("inflight-pulse")
        os.ftruncate(descriptor, Pulse.size(slots))
        return descriptor

    @property
    def beats(self) -> int:
        """Grows as long as the process is not stuck: with every step, and each second without one."""
        return self._words[_BEATS]

    @property
    def num_tokens(self) -> int:
        """Of the step that was launched last."""
        return self._words[_TOKENS]

    @property
    def num_live(self) -> int:
        """Requests, of all frontends, that had not ended at the last beat."""
        return self._words[_LIVE]

    def beat(self, num_live: int) -> None:
        self._words[_BEATS] += 1
        self._words[_LIVE] = num_live

    def taking(self, request_id: int | None) -> None:
        """A request is being taken in; None: it has been."""
        self._words[_TAKING] = 0 if request_id is None else request_id + 1

    def launched(self, out: SchedulerOutput) -> None:
        """A step is about to run.  A slot keeps its last sequence until another enters it."""
        words = self._words
        words[_TOKENS] = out.num_tokens
        for slot in out.preempted:
            words[_SLOTS + slot] = 0
        for row in out.new_rows:
            words[_SLOTS + row.slot] = (row.request_id + 1) << _INDEX_BITS | row.index

    def ran(self) -> dict[int, set[int]]:
        """Sequences by request that may be the cause of a death; some of them have ended before.

        The request that was being taken in, with no sequence, or those that ran.
        """
        if self._words[_TAKING]:
            return {self._words[_TAKING] - 1: set()}
        found: dict[int, set[int]] = {}
        for word in self._words[_SLOTS:]:
            if word:
                found.setdefault((word >> _INDEX_BITS) - 1, set()).add(word & (1 << _INDEX_BITS) - 1)
        return found


class PulsingRunner:
    """A `Runner` that writes down what it is about to run.

    Attributes:
        info, collect: the other runner's.
    """

    def __init__(self, runner: Runner, pulse: Pulse) -> None:
        self._runner = runner
        self._pulse = pulse
        self.info: ModelInfo = runner.info
        self.collect = runner.collect

    @property
    def num_collected_first(self) -> int:
        return getattr(self._runner, "num_collected_first", 0)

    def launch(self, out: SchedulerOutput) -> Any:
        self._pulse.launched(out)
        return self._runner.launch(out)
