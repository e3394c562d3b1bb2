"""Admission by KV memory, now and at its predicted peak.

`FreeBlocksAdmission` (defaults.py) looks at the blocks that are free now.  Requests grow, though: a burst of
short prompts fits at first, and then preempts until it has ended.  `PredictedPeakAdmission` admits a request
while the peak that the running ones will reach fits the pool, after the "future" half of the Past-Future
scheduler (Gong et al., arXiv:2507.10150): memory peaks just before a request ends, so only those moments
are checked.

    blocks   .-'|            e.g. three requests that grow by a block a step, ends at r1, r2, r3:
          .-'   |  .-'|      the peak is the largest of the sums just before r1, r2 and r3
       .-'      '-'   '...
      now      r1     r2   r3

Pure Python, no torch.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from inflight.engine.events import EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.defaults import FreeBlocksAdmission
from inflight.engine.request import Request

__all__ = ["Forecast", "OutputLengths", "PredictedPeakAdmission"]

_WINDOW = 256  # ended requests from which outputs are predicted
_UNKNOWN = 256  # expected output tokens of a request while nothing is known
# Share of the pool that the predicted peak leaves free, since outputs vary; and the extra share for a request that
# was preempted before, so that it returns only when it is likely to stay.
_MARGIN = 0.02
_MARGIN_PER_PREEMPTION = 0.05
_MAX_COUNTED_PREEMPTIONS = 4
_GRAIN = 4  # steps; expected ends are rounded up to multiples of it, so that there are few moments to check
# Any number of multiples of these, modulo 1, spread evenly (additive recurrence).
_GOLDEN, _SILVER, _PLASTIC = 0.6180339887498949, 0.4142135623730951, 0.7548776662466927


class OutputLengths:
    """Predicts how many tokens a request will yield, from the last requests that ended.

    A request with n output tokens is expected to end like one of the requests that yielded more than n.  This
    one is drawn for each request, so that together they have the same spread; with the mean, all would end
    together.  One more entry is a guess: 256 tokens, or 2 n for a request that has outlived that, but at most
    the request's limit.  At first it is the only entry; later it represents the outliers.  `max_tokens` is no
    estimate: clients declare far more than they use.

    Attributes:
        num_seen: requests that ended, ever.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        self.num_seen = 0
        self._window = window
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        """Add the output length of a request that ended."""
        self.num_seen += 1
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > self._window:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def mean(self, limit: int) -> float:
        """Mean output of these requests, each cut at `limit`; `limit` itself while nothing is known."""
        shorter = bisect_right(self._sorted, limit)
        total = sum(self._sorted[:shorter]) + (len(self._sorted) - shorter) * limit
        return total / len(self._sorted) if self._sorted else limit

    def likely(self, request: Request) -> int:
        """As `expected`, but with the guess only where nothing is known: for a sum over many requests."""
        num_tokens = request.num_tokens - request.num_prompt_tokens
        limit = request.max_total_tokens - request.num_prompt_tokens
        longer = bisect_right(self._sorted, num_tokens)
        if longer == len(self._sorted):
            return min(max(1, 2 * num_tokens), limit)
        draw = (request.request_id * _GOLDEN + request.index * _SILVER) % 1.0
        return min(self._sorted[longer + int(draw * (len(self._sorted) - longer))], limit)

    def expected(self, request: Request) -> int:
        """Output tokens at which the request is expected to end; drawn again for each number of tokens that it has."""
        num_tokens = request.num_tokens - request.num_prompt_tokens
        limit = request.max_total_tokens - request.num_prompt_tokens
        longer = bisect_right(self._sorted, num_tokens)
        draw = (request.request_id * _GOLDEN + request.index * _SILVER + num_tokens * _PLASTIC) % 1.0
        index = longer + int(draw * (len(self._sorted) - longer + 1))
        guess = self._sorted[index] if index < len(self._sorted) else max(_UNKNOWN, 2 * num_tokens)
        return min(guess, limit)


# (offset, end): a request that holds `offset + t` tokens in step t, up to step `end`.
Growth = tuple[int, int]


@dataclass(slots=True)
class _End:
    """The requests that end in one step, and the sum of their offsets."""

    requests: set[Request] = field(default_factory=set)
    offsets: int = 0


class Forecast:
    """How many tokens requests will hold together, if each grows by one token per step until its end.

    Steps are numbered from the engine's first, so that a growth stays valid as long as its request follows it:
    only requests that come, go or outlive their end are touched, and only `peak` visits all ends.

    Attributes:
        final_tokens: tokens of all requests, each at its end; an upper bound of the peak.
    """

    def __init__(self) -> None:
        self.final_tokens = 0
        self._growths: dict[Request, Growth] = {}
        self._ends: dict[int, _End] = {}

    def __len__(self) -> int:
        return len(self._growths)

    def add(self, request: Request, growth: Growth) -> None:
        self._growths[request] = growth
        offset, step = growth
        end = self._ends.get(step)
        if end is None:
            end = self._ends[step] = _End()
        end.requests.add(request)
        end.offsets += offset
        self.final_tokens += offset + step

    def remove(self, request: Request) -> None:
        offset, step = self._growths.pop(request)
        end = self._ends[step]
        end.requests.remove(request)
        end.offsets -= offset
        if not end.requests:
            del self._ends[step]
        self.final_tokens -= offset + step

    def pop_ending(self, step: int) -> list[Request]:
        """Remove and return the requests that end in this step."""
        end = self._ends.pop(step, None)
        if end is None:
            return []
        self.final_tokens -= end.offsets + len(end.requests) * step
        for request in end.requests:
            del self._growths[request]
        return list(end.requests)

    def of(self, requests: Iterable[Request]) -> Forecast:
        """The forecast for some of the requests."""
        forecast = Forecast()
        for request in requests:
            forecast.add(request, self._growths[request])
        return forecast

    def peak(self, extra: float) -> float:
        """Most tokens that they will hold at the same time, with `extra` more for each request."""
        alive = offsets = 0
        peak = 0.0
        for step in sorted(self._ends, reverse=True):
            end = self._ends[step]
            alive += len(end.requests)
            offsets += end.offsets
            peak = max(peak, offsets + alive * (step + extra))
        return peak


class PredictedPeakAdmission(EngineListener):
    """Admits a request if the predicted peak of it and all running requests fits the pool.

    A request that would run alone is always admitted if its tokens fit now.  Blocks shared by a prefix count
    once.  A request's expected end is drawn when it is admitted, and again when the request has outlived it (until
    then the draw is as good as a new one) or when twice as many requests have ended.

    Takes constant time if the pool can hold all requests at their ends; else O(E log E), where E is the
    number of expected ends.

    Args:
        watermark: share of the pool that stays free now and at the peak.
        margin: further share of the pool that stays free at the peak.
    """

    def __init__(self, watermark: float = 0.0, margin: float = _MARGIN) -> None:
        self._now = FreeBlocksAdmission(watermark)
        self._share = 1 - watermark - margin
        self._lengths = OutputLengths()
        self._step = 0
        self._next_review = 1  # ended requests at which all ends are drawn again
        self._forecast = Forecast()  # of all running requests, without the tokens of `_hits`
        self._hits: dict[Request, int] = {}  # leading tokens of each in blocks of the prefix cache
        self._num_hits = 0
        self._asked: tuple[Request | None, Growth] = None, (0, 0)  # the last request that `admits` judged in this step

    def step_begins(self, running: Sequence[Request]) -> None:
        self._step += 1
        self._asked = None, (0, 0)
        drawn = self._forecast.pop_ending(self._step)  # they still run
        if self._lengths.num_seen >= self._next_review:
            self._next_review = 2 * self._lengths.num_seen
            self._forecast, drawn = Forecast(), list(self._hits)
        for request in drawn:
            self._forecast.add(request, self._expected_growth(request, self._hits[request]))

    def admits(self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool) -> bool:
        if not self._now.admits(request, prefix, running, pool):
            return False
        if not running:
            return True
        growth = self._expected_growth(request, pool.block_size * len(prefix))
        self._asked = request, growth
        num_unshared = pool.num_references - self._num_hits // pool.block_size
        if self._fits(request, growth, prefix, self._forecast, num_unshared, pool):
            return True
        if len(running) == len(self._forecast):
            return False
        # Only `running` is expected to grow: the other requests count with their present blocks.
        num_unshared = sum(len(other.block_ids) - self._hits[other] // pool.block_size for other in running)
        return self._fits(request, growth, prefix, self._forecast.of(running), num_unshared, pool)

    def _fits(
        self,
        request: Request,
        growth: Growth,
        prefix: Sequence[int],
        forecast: Forecast,
        num_unshared: int,
        pool: KVPool,
    ) -> bool:
        """Whether the pool holds the forecast and `growth`; `num_unshared` blocks hold the forecast's tokens now."""
        # Other blocks in use: shared ones, and blocks of the prefix that would be in use again.
        blocks = pool.num_used - num_unshared + pool.num_reclaimed(prefix)
        share = self._share - _MARGIN_PER_PREEMPTION * min(request.num_preemptions, _MAX_COUNTED_PREEMPTIONS)
        room = pool.block_size * (share * pool.num_blocks - blocks)
        extra = (pool.block_size + 1) / 2  # n + 1 tokens take the blocks of n + (size + 1) / 2, on average
        if forecast.final_tokens + sum(growth) + extra * (len(forecast) + 1) <= room:
            return True
        forecast.add(request, growth)
        peak = forecast.peak(extra)
        forecast.remove(request)
        return peak <= room

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        self._hits[request] = num_cached_tokens
        self._num_hits += num_cached_tokens
        asked, growth = self._asked
        self._forecast.add(request, growth if asked is request else self._expected_growth(request, num_cached_tokens))

    def left(self, request: Request) -> None:
        self._num_hits -= self._hits.pop(request)
        self._forecast.remove(request)

    def ended(self, request: Request) -> None:
        if request.num_output_tokens:
            self._lengths.add(request.num_output_tokens)

    def _expected_growth(self, request: Request, hits: int) -> Growth:
        """The request's growth from now on, with `hits` of its tokens in blocks of the prefix cache."""
        num_tokens = request.num_total_tokens
        left = request.num_prompt_tokens + self._lengths.expected(request) - num_tokens
        end = self._step + max(1, left)
        return num_tokens - hits - self._step, -(-end // _GRAIN) * _GRAIN
