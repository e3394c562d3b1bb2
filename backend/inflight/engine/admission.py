"""Whether there is memory for one more request, now and later.

`FreeBlocksAdmission` (policy.py) looks at the blocks that are free now.  Requests grow, though: a
burst of short prompts fits at once and preempts for the rest of its life.  `PredictedPeakAdmission`
admits while the most blocks that will ever be needed fit, after the "future" half of the Past-Future
scheduler (Gong et al., arXiv:2507.10150): memory peaks just before a request ends, so it is enough to
look at those moments.

    blocks   .-'|            e.g. three requests that grow by a block a step, ends at r1, r2, r3:
          .-'   |  .-'|      the peak is the largest of the sums just before r1, r2 and r3
       .-'      '-'   '...
      now      r1     r2   r3

Pure Python, no torch.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence

from inflight.config import EngineConfig
from inflight.engine.kv_pool import KVPool
from inflight.engine.policy import AdmissionPolicy, FreeBlocksAdmission
from inflight.engine.request import Request, Status

__all__ = ["OutputLengths", "PredictedPeakAdmission", "make_admission"]

_WINDOW = 256  # ended requests that outputs are predicted from
_UNKNOWN = 256  # output tokens expected of a request while nothing is known
# Share of the pool that the predicted peak leaves, since outputs vary, and more of it for a request that was
# preempted before: it comes back when it is likely to stay.
_MARGIN = 0.02
_MARGIN_PER_PREEMPTION = 0.05
_MOST_PREEMPTIONS = 4  # that count
_PATIENCE = 16  # questions for a refused request that get the same answer, unless blocks were given back
# Multiples of them, modulo 1, are spread evenly however many there are (additive recurrence).
_GOLDEN, _SILVER = 0.6180339887498949, 0.4142135623730951


def make_admission(config: EngineConfig) -> AdmissionPolicy:
    """The admission policy that `model.json` chooses."""
    if config.admission == "free_blocks":
        return FreeBlocksAdmission(config.watermark)
    return PredictedPeakAdmission(config.watermark)


class OutputLengths:
    """How many tokens a request will yield, from the last requests that ended.

    A request that has n tokens will end like one of those that had more than n.  Which one is drawn
    once for each request, so that together they are spread as those were; their mean would have all
    of them end at once.  A guess is one of them: 256 tokens, 2 n for a request that has outlived that,
    and never more than the request's own limit.  It is all there is at first, and rules the outliers
    later; `max_tokens` itself is no guess, since clients declare far more than they use.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        self._window = window
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        """A request ended with so many output tokens."""
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > self._window:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def expected(self, request: Request) -> int:
        """Output tokens at which the request will end."""
        num_tokens = request.num_output_tokens
        limit = request.max_total_tokens - request.num_prompt_tokens
        longer = bisect_right(self._sorted, num_tokens)
        draw = (request.request_id * _GOLDEN + request.index * _SILVER) % 1.0
        index = longer + int(draw * (len(self._sorted) - longer + 1))
        guess = self._sorted[index] if index < len(self._sorted) else max(_UNKNOWN, 2 * num_tokens)
        return min(guess, limit)


class PredictedPeakAdmission:
    """Admits while the predicted peak of all running requests and this one fits the pool.

    A request that would run alone is always admitted if its tokens fit now.  Blocks shared by a prefix
    count once.  Costs O(R log R) for R running requests, once in a step in which a request fits now.

    Args:
        watermark: share of the pool that stays free now and at the peak.
        margin: share of the pool that stays free at the peak beside that.
    """

    def __init__(self, watermark: float = 0.0, margin: float = _MARGIN) -> None:
        self._now = FreeBlocksAdmission(watermark)
        self._share = 1 - watermark - margin
        self._lengths = OutputLengths()
        self._patience = 0
        self._refused: Request | None = None
        self._available_then = 0
        self._beside: Sequence[Request] | None = None  # whom the next two speak of
        self._ends: list[tuple[int, int]] = []  # (steps to its end, blocks that are its own), sorted
        self._used = 0  # blocks that hold their present tokens, or will
        self._last: tuple[Request, tuple[int, int]] | None = None  # last one let in, which a budget may pass over

    def refresh(self) -> None:
        self._beside = None

    def admits(self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool) -> bool:
        if not self._now.admits(request, prefix, running, pool):
            return False
        if not running:
            return True
        if self._patience and request is self._refused and pool.num_available <= self._available_then:
            self._patience -= 1
            return False
        if running is not self._beside:
            self._look_at(running, pool)
        elif self._last is not None and self._last[0].status is Status.RUNNING:
            insort(self._ends, self._last[1])
            self._used += self._last[1][1]
        self._last = None
        missing = pool.missing_blocks(request, prefix)
        new = (self._lengths.expected(request) - request.num_output_tokens, missing)
        share = self._share - _MARGIN_PER_PREEMPTION * min(request.num_preemptions, _MOST_PREEMPTIONS)
        if self._peak(new, pool.block_size) > share * pool.num_blocks:
            self._patience, self._refused, self._available_then = _PATIENCE, request, pool.num_available
            return False
        self._last = request, new
        return True

    def ended(self, request: Request) -> None:
        self._lengths.add(request.num_output_tokens)
        self._patience = 0
        self._beside = None

    def _peak(self, new: tuple[int, int], block_size: int) -> float:
        """Most blocks that those looked at and a new one will hold, if all grow by a token a step from now on."""
        ends = self._ends.copy()
        insort(ends, new)
        used = float(self._used + new[1])
        alive, most = len(ends), used
        for steps, own in ends:
            most = max(most, used + alive * steps / block_size)
            used -= own
            alive -= 1
        return most

    def _look_at(self, running: Sequence[Request], pool: KVPool) -> None:
        block_size, expected = pool.block_size, self._lengths.expected
        self._beside, self._used, self._ends = running, pool.num_used, []
        for request in running:
            held = len(request.block_ids)
            lacks = max(0, request.num_tokens // block_size + 1 - held)
            self._used += lacks
            own = held + lacks - request.num_cached_tokens // block_size
            self._ends.append((expected(request) - request.num_output_tokens, own))
        self._ends.sort()
