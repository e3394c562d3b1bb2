"""Non-negative least squares, which the calibration and the static baseline fit their costs with."""

from __future__ import annotations

import numpy as np

__all__ = ["nonnegative_least_squares"]


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
            candidate = np.zeros_like(x)
            candidate[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            negative = passive & (candidate <= 0)
            if not negative.any():
                break
            # Move towards the unconstrained solution until the first coefficient reaches zero.
            step = (x[negative] / (x[negative] - candidate[negative] + 1e-300)).min()
            x = np.maximum(0.0, x + step * (candidate - x))
            passive &= x > 1e-12
        x = candidate
    return x / scale
