"""Shared memory in which the engine process records that it is alive and which sequences it runs.  No torch.

The process that started the engine reads the page when no step has arrived for a long time, and after the engine's
death.  Writing costs nanoseconds: nothing for a token, one addition for a step, one word for a sequence that enters a
slot.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inflight.engine.step import SchedulerOutput

__all__ = ["Heartbeat"]

_BEATS, _ADDING, _TOKENS, _LIVE, _SLOTS = 0, 1, 2, 3, 4  # words of 64 bits; from `_SLOTS` on one for each slot
_INDEX_BITS = 8  # n is at most 128


class Heartbeat:
    """The page.  One process writes, others read; each word is written atomically.

    Args:
        descriptor: of the shared memory; the caller owns it.
        slots: maximum number of sequences that run at the same time.
    """

    def __init__(self, descriptor: int, slots: int) -> None:
        self._words = memoryview(mmap.mmap(descriptor, self.size(slots))).cast("Q")

    @staticmethod
    def size(slots: int) -> int:
        """Bytes of a page."""
        return 8 * (_SLOTS + slots)

    @staticmethod
    def create(slots: int) -> int:
        """A descriptor of new shared memory, all zero; the kernel frees it with its last descriptor and mapping."""
        descriptor = os.memfd_create("inflight-heartbeat")
        os.ftruncate(descriptor, Heartbeat.size(slots))
        return descriptor

    @property
    def beats(self) -> int:
        """Grows as long as the process is not stuck: with every step, and each second without one."""
        return self._words[_BEATS]

    @property
    def num_tokens(self) -> int:
        """Tokens of the last step that was launched."""
        return self._words[_TOKENS]

    @property
    def num_live(self) -> int:
        """Requests of all frontends that had not ended at the last beat."""
        return self._words[_LIVE]

    def beat(self, num_live: int) -> None:
        self._words[_BEATS] += 1
        self._words[_LIVE] = num_live

    def adding(self, request_id: int | None) -> None:
        """The engine starts to add this request; None: it has added it."""
        self._words[_ADDING] = 0 if request_id is None else request_id + 1

    def launched(self, out: SchedulerOutput) -> None:
        """A step is about to run.  A slot keeps its last sequence until another enters or the sequence is preempted."""
        words = self._words
        words[_TOKENS] = out.num_tokens
        for slot in out.preempted:
            words[_SLOTS + slot] = 0
        for row in out.new_rows:
            words[_SLOTS + row.slot] = (row.request_id + 1) << _INDEX_BITS | row.index

    def ran(self) -> dict[int, set[int]]:
        """Sequences, by request, that can have caused the engine's death; some of them ended before it.

        Either the request that was being added, with no sequence, or the requests that ran.
        """
        if self._words[_ADDING]:
            return {self._words[_ADDING] - 1: set()}
        found: dict[int, set[int]] = {}
        for word in self._words[_SLOTS:]:
            if word:
                found.setdefault((word >> _INDEX_BITS) - 1, set()).add(word & (1 << _INDEX_BITS) - 1)
        return found
