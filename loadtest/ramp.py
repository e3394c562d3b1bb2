"""The number of users of a ramp over time."""

from __future__ import annotations

__all__ = ["ramp_users"]


def ramp_users(seconds: float, peak: int, ramp: tuple[float, float, float]) -> int | None:
    """Users at `seconds` after the start: linearly up, `peak`, linearly down to one; None at the end.

    Args:
        ramp: seconds of the rise, the peak and the fall.
    """
    up, top, down = ramp
    if seconds < up:
        return max(1, round(peak * seconds / up))
    if seconds < up + top:
        return peak
    if seconds < up + top + down:
        return max(1, round(peak * (up + top + down - seconds) / down))
    return None
