"""What a step costs, as a function of what is in it; fitted to the steps while serving.

    seconds = fixed
            + per_sequence        * sequences
            + per_context_token   * tokens that the decodes read from the KV cache
            + prefill_fixed, where there are tokens of prompts
            + per_prefill_token   * tokens of prompts
            + per_attention_pair  * query-key pairs of the prompts' attention (quadratic in a prompt)

No coefficient is below zero: a step never gets cheaper by having more in it, and an extrapolation
from a few noisy steps must not say so.  Errors are relative to the step, or the few long steps
would decide everything.  The terms follow Sarathi-Serve (arXiv:2403.02310, section 3) and Vidur
(arXiv:2405.05465, section 4).  Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from inflight.engine.step import SchedulerOutput

__all__ = ["OnlineStepCost", "StepCost", "StepLoad", "prefill_pairs", "step_load"]


class StepLoad(NamedTuple):
    """What a step computes.

    A row that computes one token is a decode here, even if that token is a prompt's last: it costs the
    same.

    Attributes:
        decodes: rows that compute one token.
        context_tokens: keys that they attend to.
        prefills: rows that compute several.
        prefill_tokens: their tokens.
        attention_pairs: their query-key pairs.
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
        """This and a chunk of `num_tokens` tokens behind `computed` ones."""
        return self._replace(
            prefills=self.prefills + 1,
            prefill_tokens=self.prefill_tokens + num_tokens,
            attention_pairs=self.attention_pairs + prefill_pairs(computed, num_tokens),
        )


def prefill_pairs(computed: int, num_tokens: int) -> int:
    """Query-key pairs of causal attention of `num_tokens` tokens behind `computed` ones."""
    return num_tokens * computed + num_tokens * (num_tokens + 1) // 2


def step_load(out: SchedulerOutput) -> StepLoad:
    """The load of a step that was made."""
    decodes = context = prefill = pairs = 0
    for num_tokens, computed in zip(out.num_scheduled_tokens, out.num_computed_tokens):
        if num_tokens == 1:
            decodes += 1
            context += computed + 1
        else:
            prefill += num_tokens
            pairs += prefill_pairs(computed, num_tokens)
    return StepLoad(decodes, context, len(out.num_scheduled_tokens) - decodes, prefill, pairs)


class StepCost(msgspec.Struct, frozen=True):
    """Coefficients of the model, all in seconds and none below zero."""

    fixed: float = 0.0
    per_sequence: float = 0.0
    per_context_token: float = 0.0
    prefill_fixed: float = 0.0
    per_prefill_token: float = 0.0
    per_attention_pair: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        """Seconds of a step."""
        seconds = self.fixed + self.per_sequence * load.sequences + self.per_context_token * load.context_tokens
        if load.prefills:
            seconds += self.prefill_fixed + self.per_prefill_token * load.prefill_tokens
            seconds += self.per_attention_pair * load.attention_pairs
        return seconds


# A load's terms stand in the order in which the descent visits them: what a step has of prompts
# explains its cost before what every step has, so that doubt makes prompts dear and not free.
_TERMS = 6


def _terms(load: StepLoad) -> tuple[float, ...]:
    has_prefill = 1.0 if load.prefills else 0.0
    return (load.prefill_tokens, load.attention_pairs, has_prefill, load.sequences, load.context_tokens, 1.0)


def _cost(weights: Sequence[float]) -> StepCost:
    per_token, per_pair, prefill_fixed, per_sequence, per_context, fixed = weights
    return StepCost(fixed, per_sequence, per_context, prefill_fixed, per_token, per_pair)


class _NormalEquations:
    """Weighted sums of x x' and x y: all that least squares needs of the steps seen."""

    def __init__(self) -> None:
        self.gram = [[0.0] * _TERMS for _ in range(_TERMS)]
        self.moment = [0.0] * _TERMS

    def add(self, x: Sequence[float], y: float, weight: float, keep: float = 1.0) -> None:
        """Take a step in; what is there already counts `keep` as much as before."""
        for i, row in enumerate(self.gram):
            wx = weight * x[i]
            for j in range(_TERMS):
                row[j] = row[j] * keep + wx * x[j]
            self.moment[i] = self.moment[i] * keep + wx * y


def _descend(parts: Sequence[_NormalEquations], weights: list[float], sweeps: int) -> None:
    """Coordinate descent to the least squares solution with no weight below zero, in place.

    Each update is exact for its coordinate, so the terms need no common scale.  From where the last
    call ended, a few sweeps a step follow a machine that drifts.
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
    """Steps of one kind, which only steps of that kind push out of memory."""

    equations: _NormalEquations
    count: int = 0


class OnlineStepCost:
    """The model, fitted to the steps as they come: recursive least squares with forgetting.

    Steps with and without prompts are remembered apart, so that hours of decoding do not wash out
    what a prompt costs.  A step that took far longer than expected (a garbage collection, another
    process) counts as little longer than one that took somewhat longer (Huber's weights); when such
    steps go on, the tolerance grows by a tenth a step, and the model follows.

    Args:
        memory: steps of a kind after which one counts 1/e.
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
        """Whether it has seen enough steps with prompts for one of them to be an outlier."""
        return self._kinds[True].count >= _WARM_UP

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step with this load took this long."""
        if seconds <= 0.0:
            return
        kind = self._kinds[load.prefills > 0]
        expected = self.cost.seconds(load)
        weight, scale = 1.0, seconds
        if kind.count >= _WARM_UP and expected > 0.0:
            scale = expected
            error = abs(seconds - expected) / expected
            tolerance = max(3.0 * self._deviation, _LEAST_TOLERANCE)
            if error > tolerance:
                weight = tolerance / error
            self._deviation += _SMOOTHING * (min(error, tolerance) - self._deviation)
        kind.equations.add(_terms(load), seconds, weight / scale**2, self._keep)
        kind.count += 1
        self.largest_prefill = max(self.largest_prefill, load.prefill_tokens)
        if load.prefills or kind.count < _WARM_UP or not kind.count % _REFIT_EVERY:
            _descend([kind.equations for kind in self._kinds], self._weights, _ONLINE_SWEEPS)
            self.cost = _cost(self._weights)


_WARM_UP = 8  # steps of a kind before one of them can be an outlier
_SMOOTHING = 0.05
_LEAST_TOLERANCE = 0.05
_ONLINE_SWEEPS = 8
_REFIT_EVERY = 4  # steps without prompts, of which there are many alike
