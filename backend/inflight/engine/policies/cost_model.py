"""A model of a step's cost as a function of its load, and its fit to the steps of a serving engine.

    seconds = curve(tokens)
            + per_sequence        * sequences
            + per_context_token   * tokens whose KV the decodes read
            + prefill_fixed, if the step computes prompt tokens
            + per_prefill_token   * prompt tokens
            + per_attention_pair  * query-key pairs of the prompts' attention (quadratic in a prompt)

The curve is piecewise linear over the tokens of a step; with a single knot it is a constant.  The
model serves `OnlineStepCost` (one knot), the simulator's calibration (many knots) and the static
baseline of a step trace.

No coefficient is negative: adding work never makes a step cheaper, and an extrapolation from a few
noisy steps must not predict that.  The terms follow Sarathi-Serve (arXiv:2403.02310, section 3) and Vidur
(arXiv:2405.05465, section 4).  Pure Python, no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from inflight.engine.step import SchedulerOutput

__all__ = ["OnlineStepCost", "StepCost", "StepLoad", "prefill_pairs", "step_load"]


class StepLoad(NamedTuple):
    """The work of a step.

    A row that computes one token counts as a decode even if that token is the last of a prompt: the
    cost is the same.

    Attributes:
        decodes: rows that compute one token.
        context_tokens: keys they attend to.
        prefills: rows that compute several tokens.
        prefill_tokens: tokens of those rows.
        attention_pairs: query-key pairs of those rows.
    """

    decodes: int = 0
    context_tokens: int = 0
    prefills: int = 0
    prefill_tokens: int = 0
    attention_pairs: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefill_tokens

    @property
    def sequences(self) -> int:
        return self.decodes + self.prefills

    def with_prefill(self, computed: int, num_tokens: int) -> StepLoad:
        """This load plus a chunk of `num_tokens` tokens that follows `computed` ones."""
        return self._replace(
            prefills=self.prefills + 1,
            prefill_tokens=self.prefill_tokens + num_tokens,
            attention_pairs=self.attention_pairs + prefill_pairs(computed, num_tokens),
        )


def prefill_pairs(computed: int, num_tokens: int) -> int:
    """Query-key pairs in causal attention of `num_tokens` tokens that follow `computed` ones."""
    return num_tokens * computed + num_tokens * (num_tokens + 1) // 2


def step_load(out: SchedulerOutput) -> StepLoad:
    """The load of a scheduled step."""
    decodes = context = prefill = pairs = 0
    for num_tokens, computed in zip(out.num_scheduled_tokens, out.num_computed_tokens):
        if num_tokens == 1:
            decodes += 1
            context += computed + 1
        else:
            prefill += num_tokens
            pairs += prefill_pairs(computed, num_tokens)
    return StepLoad(decodes, context, len(out.num_scheduled_tokens) - decodes, prefill, pairs)


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of the model, in seconds; none is negative.

    Attributes:
        tokens: knots of the curve, increasing, at least one.  Below the first knot the curve is flat;
            beyond the last one its last segment continues.
        seconds_at: the curve at each knot, not decreasing.
        per_sequence, per_context_token, prefill_fixed, per_prefill_token, per_attention_pair: see above.
    """

    tokens: tuple[int, ...] = (1,)
    seconds_at: tuple[float, ...] = (0.0,)
    per_sequence: float = 0.0
    per_context_token: float = 0.0
    prefill_fixed: float = 0.0
    per_prefill_token: float = 0.0
    per_attention_pair: float = 0.0

    @classmethod
    def linear(
        cls,
        fixed: float = 0.0,
        per_sequence: float = 0.0,
        per_context_token: float = 0.0,
        prefill_fixed: float = 0.0,
        per_prefill_token: float = 0.0,
        per_attention_pair: float = 0.0,
    ) -> StepCost:
        """The model without a curve: every step takes `fixed` seconds plus the linear terms."""
        return cls(
            seconds_at=(fixed,),
            per_sequence=per_sequence,
            per_context_token=per_context_token,
            prefill_fixed=prefill_fixed,
            per_prefill_token=per_prefill_token,
            per_attention_pair=per_attention_pair,
        )

    def seconds(self, load: StepLoad) -> float:
        """Seconds that a step with this load takes."""
        decodes, context_tokens, prefills, prefill_tokens, attention_pairs = load
        seconds = self.seconds_at[0] if len(self.seconds_at) == 1 else self._curve(decodes + prefill_tokens)
        seconds += self.per_sequence * (decodes + prefills) + self.per_context_token * context_tokens
        if prefills:
            seconds += self.prefill_fixed + self.per_prefill_token * prefill_tokens
            seconds += self.per_attention_pair * attention_pairs
        return seconds

    def recompute_seconds(self, num_kept: int, num_computed: int) -> float:
        """Seconds added to a step by computing tokens `num_kept` to `num_computed` of a request again."""
        num_tokens = num_computed - num_kept
        seconds = self.per_prefill_token * num_tokens + self.per_attention_pair * prefill_pairs(num_kept, num_tokens)
        return seconds + self._curve(num_tokens) - self.seconds_at[0]

    def _curve(self, tokens: int) -> float:
        knots, values = self.tokens, self.seconds_at
        if len(knots) == 1 or tokens <= knots[0]:
            return values[0]
        right = min(bisect_right(knots, tokens), len(knots) - 1)
        share = (tokens - knots[right - 1]) / (knots[right] - knots[right - 1])
        return values[right - 1] + share * (values[right] - values[right - 1])


# The order of a load's terms is the order in which the descent visits them: prompt terms come first,
# so that indistinguishable costs are charged to prompts, which would otherwise look free.
_TERMS = 6


def _terms(load: StepLoad) -> tuple[float, ...]:
    has_prefill = 1.0 if load.prefills else 0.0
    return (load.prefill_tokens, load.attention_pairs, has_prefill, load.sequences, load.context_tokens, 1.0)


def _cost(weights: Sequence[float]) -> StepCost:
    per_token, per_pair, prefill_fixed, per_sequence, per_context, fixed = weights
    return StepCost.linear(fixed, per_sequence, per_context, prefill_fixed, per_token, per_pair)


class _NormalEquations:
    """Weighted sums of x x' and x y: all that least squares needs of the observed steps."""

    def __init__(self) -> None:
        self.gram = [[0.0] * _TERMS for _ in range(_TERMS)]
        self.moment = [0.0] * _TERMS

    def add(self, x: Sequence[float], y: float, weight: float, keep: float = 1.0) -> None:
        """Add an observation; scale the earlier ones by `keep`."""
        for i, row in enumerate(self.gram):
            wx = weight * x[i]
            for j in range(_TERMS):
                row[j] = row[j] * keep + wx * x[j]
            self.moment[i] = self.moment[i] * keep + wx * y


def _descend(parts: Sequence[_NormalEquations], weights: list[float], sweeps: int) -> None:
    """Coordinate descent towards the non-negative least squares solution, in place.

    Each update is exact for its coordinate, so the terms need no common scale.  From the previous
    solution, a few sweeps per step suffice to follow a machine that drifts.
    """
    gram = [[sum(part.gram[i][j] for part in parts) for j in range(_TERMS)] for i in range(_TERMS)]
    moment = [sum(part.moment[i] for part in parts) for i in range(_TERMS)]
    for _ in range(sweeps):
        for i, row in enumerate(gram):
            if row[i] > 0.0:
                explained = sum(g * w for g, w in zip(row, weights))
                weights[i] = max(0.0, weights[i] + (moment[i] - explained) / row[i])


@dataclass
class _Kind:
    """Observed steps of one kind; only newer steps of the same kind displace them."""

    equations: _NormalEquations
    count: int = 0


class OnlineStepCost:
    """Fits the model to the steps one by one: recursive least squares with forgetting.

    Errors are relative to the step; otherwise the few long steps would dominate.  Steps with
    and without prompts are remembered separately, so that hours of decoding do not erase the
    cost of a prompt.  A step that takes far longer than expected (a garbage collection, another process) is
    an outlier and counts little more than a slightly slow one (Huber weights).  If outliers persist, the
    tolerance grows by a tenth per step and the model adapts.

    Args:
        memory: number of steps of the same kind after which an observation weighs 1/e.

    Attributes:
        cost: the current fit.
        largest_prefill: most prompt tokens observed in a step.
    """

    def __init__(self, memory: int = 50) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._kinds = (_Kind(_NormalEquations()), _Kind(_NormalEquations()))
        self._weights = [0.0] * _TERMS
        self._deviation = 0.25
        self.cost = StepCost()
        self.largest_prefill = 0

    @property
    def knows_prompts(self) -> bool:
        """Whether enough steps with prompts were observed to recognise an outlier."""
        return self._kinds[True].count >= _WARM_UP

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step with this load that took `seconds`; ignored unless positive."""
        if seconds <= 0.0:
            return
        kind = self._kinds[load.prefills > 0]
        expected = self.cost.seconds(load)
        weight, scale = 1.0, seconds
        if kind.count >= _WARM_UP and expected > 0.0:
            scale = expected
            error = abs(seconds - expected) / expected
            tolerance = max(3.0 * self._deviation, _MIN_TOLERANCE)
            if error > tolerance:
                weight = tolerance / error
            self._deviation += _SMOOTHING * (min(error, tolerance) - self._deviation)
        kind.equations.add(_terms(load), seconds, weight / scale**2, self._keep)
        kind.count += 1
        self.largest_prefill = max(self.largest_prefill, load.prefill_tokens)
        if load.prefills or kind.count < _WARM_UP or not kind.count % _REFIT_EVERY:
            _descend([kind.equations for kind in self._kinds], self._weights, _ONLINE_SWEEPS)
            self.cost = _cost(self._weights)


_WARM_UP = 8  # steps of a kind before one of them can count as an outlier
_SMOOTHING = 0.05
_MIN_TOLERANCE = 0.05
_ONLINE_SWEEPS = 8
_REFIT_EVERY = 4  # steps without prompts: they are many, and alike
