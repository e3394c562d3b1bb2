"""Fits the cost model of a step to a calibration's measurements.

Matrix products do not cost the same for every token: kernels change with the number of rows, and a
few rows cost as much as reading the weights.  The cost over the tokens of a step is therefore a
non-decreasing curve with knots; sequences, context and attention pairs are linear on top of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from inflight.engine.policies.cost_model import StepCost, StepLoad
from inflight_tools.least_squares import nonnegative_least_squares

__all__ = ["fit_cost"]

# Where the curve can bend, in tokens; each knot moves to the nearest number that was measured.
_KNOTS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, *(1024 << k for k in range(8)))
_MIN_LAST_RATIO = 1.4  # of the last segment's ends, since that segment is extrapolated
_REWEIGHTINGS = 5
_MIN_SECONDS = 1e-7


def fit_cost(measured: Sequence[tuple[StepLoad, float]]) -> StepCost:
    """Least squares of the errors relative to the expected cost, with no negative coefficient.

    Relative to the expected cost rather than the measured one: a step that the machine delayed counts in
    full, as it does for a user who waits for it, and means remain means.

    Args:
        measured: load and seconds of each kind of step; seconds above 0.
    """
    loads, seconds = [load for load, _ in measured], np.array([seconds for _, seconds in measured])
    tokens = np.array([load.tokens for load in loads], float)
    seen = np.unique(tokens)
    wanted = [knot for knot in _KNOTS if knot * _MIN_LAST_RATIO <= seen[-1]]
    knots = np.unique([seen[0], *(seen[np.abs(seen - knot).argmin()] for knot in wanted), seen[-1]])
    # The curve is parametrised by its value at the first knot and its rise over each segment.
    rises = [np.clip((tokens - low) / (high - low), 0, 1) for low, high in itertools.pairwise(knots)]
    linear = [[load.sequences, load.context_tokens, load.attention_pairs] for load in loads]
    design = np.column_stack([np.ones_like(tokens), *rises, np.array(linear, float)])
    expected = seconds
    for _ in range(_REWEIGHTINGS):
        found = nonnegative_least_squares(design / expected[:, None], seconds / expected)
        expected = np.maximum(design @ found, _MIN_SECONDS)
    values = np.cumsum(found[: len(knots)])
    per_sequence, per_context, per_pair = map(float, found[len(knots) :])
    return StepCost(
        tokens=tuple(knots.astype(int).tolist()),
        seconds_at=tuple(values.tolist()),
        per_sequence=per_sequence,
        per_context_token=per_context,
        per_attention_pair=per_pair,
    )
