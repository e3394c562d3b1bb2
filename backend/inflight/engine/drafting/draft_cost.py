"""The cost of a draft token, in tokens that the engine would emit in the same time.  No torch.

A step with S sequences takes a + m d seconds with d draft tokens, and the engine emits r tokens a second.  To add a
draft token that is accepted with probability p gains p tokens and costs m r of them, so it pays while p > m r: the
condition for the most tokens a second.  Where reading the weights is most of a step, m r is small; where every
token costs the same, it is 1 or more.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DraftPrices"]

_MEMORY = 0.96  # share of a step's weight that is left after the next step of its size
_PRIOR = 0.1  # price of a draft token while little is known, in a step of one sequence
_BELIEF_WEIGHT = 16.0  # of the previous belief, in squared draft tokens
_MARGIN = 1.25  # the gain must exceed the cost by this factor: drafts take time to find, and prices are estimates
# Draft tokens of a first step that measures their cost; a later step has at most twice as many as any before.
_FIRST_ROOM = 16
_OUTLIER = 1.5  # a step that takes so many times as long as expected was disturbed by something else
_TICK = 1e-9  # seconds; a virtual clock may not advance
_PROBE_STEPS = 128  # steps without drafts until one shows whether they pay now


@dataclass(slots=True)
class _Steps:
    """Decayed sums over the steps of about one size.

    Attributes:
        believed: seconds of a draft token, relative to a step without drafts, by the steps that have faded.
        most_drafts: most draft tokens of a step.
    """

    believed: float
    count: float = 0.0
    drafts: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0
    products: float = 0.0
    emitted: float = 0.0
    most_drafts: int = 0

    def add(self, num_drafts: int, seconds: float, emitted: int) -> None:
        self.count = _MEMORY * self.count + 1.0
        self.drafts = _MEMORY * self.drafts + num_drafts
        self.squares = _MEMORY * self.squares + num_drafts**2
        self.seconds = _MEMORY * self.seconds + seconds
        self.products = _MEMORY * self.products + num_drafts * seconds
        self.emitted = _MEMORY * self.emitted + emitted
        self.most_drafts = max(self.most_drafts, num_drafts)
        if num_drafts:
            base, slope = self.line()
            self.believed = slope / base

    def line(self) -> tuple[float, float]:
        """Seconds of a step without drafts, and of one draft token."""
        mean, drafts = self.seconds / self.count, self.drafts / self.count
        variance = max(0.0, self.squares - self.count * drafts**2)
        covariance = self.products - self.count * mean * drafts
        believed = self.believed * mean / (1.0 + self.believed * drafts)
        slope = max(0.0, (covariance + _BELIEF_WEIGHT * believed) / (variance + _BELIEF_WEIGHT))
        return max(mean - slope * drafts, 0.1 * mean), slope


class DraftPrices:
    """Follows the cost of steps.

    Attributes:
        price: of a draft token in the next step; from 1 on none pays.
        room: draft tokens that the next step may have.  Where none pays, a long time without any still allows a few:
            they show whether drafts pay again.
    """

    def __init__(self, target: float | None = None) -> None:
        self._target = target
        self._sizes: dict[int, _Steps] = {}
        self._without = 0  # steps since one had drafts
        self.price = float("inf")
        self.room = 0

    def begin(self, num_sequences: int) -> None:
        """The scheduler is about to make a step with so many sequences."""
        self.price, self.room = float("inf"), 0
        if not num_sequences:
            return
        steps = self._sizes.get(_size(num_sequences))
        if steps is None:
            self.price, self.room = _MARGIN * self._believed(num_sequences) * num_sequences, _FIRST_ROOM
            return
        base, slope = steps.line()
        self.price = _MARGIN * slope * steps.emitted / steps.seconds
        self.room = max(_FIRST_ROOM, 2 * steps.most_drafts)
        if self.price >= 1.0:
            self.room = num_sequences if self._without >= _PROBE_STEPS else 0
        elif self._target is not None and slope > 0.0:
            self.room = min(self.room, max(0, int((self._target - base) / slope)))

    def observe(self, num_sequences: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Learn from a step without prompts, which took so long."""
        self._without = 0 if num_drafts else self._without + 1
        seconds = max(seconds, _TICK)
        size = _size(num_sequences)
        steps = self._sizes.get(size)
        if steps is None:
            steps = self._sizes[size] = _Steps(self._believed(num_sequences))
        if steps.count > 1.0 and num_drafts <= steps.most_drafts:  # else there is nothing to compare with
            base, slope = steps.line()
            seconds = min(seconds, _OUTLIER * (base + slope * num_drafts))
        steps.add(num_drafts, seconds, num_sequences + num_accepted)

    def passed(self) -> None:
        """Count a step without drafts that taught nothing."""
        self._without += 1

    def _believed(self, num_sequences: int) -> float:
        """Seconds of a draft token, relative to a step of a size not seen yet: as at the closest size seen.

        While no size was seen: the larger the batch, the smaller the part of a step that reads weights.
        """
        if not self._sizes:
            return _PRIOR / num_sequences**0.5
        closest = min(self._sizes, key=lambda size: abs(size - num_sequences))
        return self._sizes[closest].believed


def _size(num_sequences: int) -> int:
    """The same for steps whose numbers of sequences are equal or differ by less than an eighth."""
    shift = max(0, num_sequences.bit_length() - 4)
    return (num_sequences >> shift) << shift
