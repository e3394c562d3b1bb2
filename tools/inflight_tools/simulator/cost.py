"""The cost of a step as calibration finds it, and the least squares behind it.

Matrix products do not cost the same for every token: kernels change with the number of rows, and
few rows cost what reading the weights costs.  So the cost over the tokens of a step is a curve with
knots, never falling, and the rest is linear as in `engine.cost_model`:

    seconds = curve(tokens) + per_sequence * sequences + per_context_token * context + per_attention_pair * pairs
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import numpy as np

from inflight.engine.policies.cost_model import StepLoad

__all__ = ["MeasuredCost", "fit_cost", "nonnegative_least_squares"]

# Where the curve may bend, in tokens; each is moved to the nearest number that was measured.
_KNOTS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, *(1024 << k for k in range(8)))
_LEAST_RISE = 1.4  # of the last segment, which is prolonged
_REWEIGHTINGS = 5
_LEAST_SECONDS = 1e-7


class MeasuredCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step.

    Attributes:
        tokens: knots of the curve, rising; the last segment goes on beyond the last one.
        seconds_at: the curve there, not falling.
    """

    tokens: list[int]
    seconds_at: list[float]
    per_sequence: float = 0.0
    per_context_token: float = 0.0
    per_attention_pair: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        """Seconds of a step with this load."""
        return (
            self._curve(load.tokens)
            + self.per_sequence * load.sequences
            + self.per_context_token * load.context_tokens
            + self.per_attention_pair * load.attention_pairs
        )

    def _curve(self, tokens: int) -> float:
        knots, values = self.tokens, self.seconds_at
        if len(knots) == 1 or tokens <= knots[0]:
            return values[0]
        right = min(bisect_right(knots, tokens), len(knots) - 1)
        share = (tokens - knots[right - 1]) / (knots[right] - knots[right - 1])
        return values[right - 1] + share * (values[right] - values[right - 1])


def fit_cost(measured: Sequence[tuple[StepLoad, float]]) -> MeasuredCost:
    """Least squares of the errors relative to what is expected, with no cost below zero.

    Relative to the expected and not to the measured: a step that the machine held up counts in full, as
    it does for whoever waits, and means stay means.

    Args:
        measured: load and seconds of each kind of step; seconds above 0.
    """
    loads, seconds = [load for load, _ in measured], np.array([seconds for _, seconds in measured])
    tokens = np.array([load.tokens for load in loads], float)
    seen = np.unique(tokens)
    wanted = [knot for knot in _KNOTS if knot * _LEAST_RISE <= seen[-1]]
    knots = np.unique([seen[0], *(seen[np.abs(seen - knot).argmin()] for knot in wanted), seen[-1]])
    # The curve is a height at the first knot and a rise in each segment.
    rises = [np.clip((tokens - low) / (high - low), 0, 1) for low, high in itertools.pairwise(knots)]
    linear = [[load.sequences, load.context_tokens, load.attention_pairs] for load in loads]
    design = np.column_stack([np.ones_like(tokens), *rises, np.array(linear, float)])
    expected = seconds
    for _ in range(_REWEIGHTINGS):
        found = nonnegative_least_squares(design / expected[:, None], seconds / expected)
        expected = np.maximum(design @ found, _LEAST_SECONDS)
    values = np.cumsum(found[: len(knots)])
    per_sequence, per_context, per_pair = map(float, found[len(knots) :])
    return MeasuredCost(
        tokens=knots.astype(int).tolist(),
        seconds_at=values.tolist(),
        per_sequence=per_sequence,
        per_context_token=per_context,
        per_attention_pair=per_pair,
    )


def nonnegative_least_squares(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 [n] that minimises |design [m, n] x - target [m]|, by the active set method.

    Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    """
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    matrix = design / scale
    x, passive = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], bool)
    for _ in range(10 * len(x)):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[passive] = 0.0
        if gradient.max() <= 1e-9 * len(target):
            break
        passive[gradient.argmax()] = True
        while True:
            tried = np.zeros_like(x)
            tried[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            below = passive & (tried <= 0)
            if not below.any():
                break
            # As far towards the free solution as nothing falls below zero.
            step = (x[below] / (x[below] - tried[below] + 1e-300)).min()
            x = np.maximum(0.0, x + step * (tried - x))
            passive &= x > 1e-12
        x = tried
    return x / scale
