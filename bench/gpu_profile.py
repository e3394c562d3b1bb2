"""The profile of some steps: launches, the time in which the GPU is busy, and its dearest kernels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["covered", "dearest", "profiled", "shares"]

_LAUNCH = re.compile(r"^(cuda|cu)(LaunchKernel|GraphLaunch)")
_DEAREST = 12


def profiled(steps: Callable[[], Any]) -> list[Any]:
    """The profiler's events while `steps` runs, without the ranges that a user has named."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        steps()
    return [event for event in profiler.events() or [] if not getattr(event, "is_user_annotation", False)]


def shares(events: Sequence[Any], steps: int) -> dict[str, Any]:
    """Launches by the host and seconds in which the GPU is busy, per step, and the dearest kernels.

    Empty if the profiler saw no GPU.  It slows the host down, but not the kernels: the time of a step is measured
    without it.

    Returns:
        "launches"; "busy", when at least one kernel or copy runs; "kernels", as `dearest` returns them.
    """
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    if not on_device:
        return {}
    spans = [(event.time_range.start, event.time_range.end) for event in on_device]
    launches = sum(bool(_LAUNCH.match(event.name)) for event in events)
    return {
        "launches": launches / steps,
        "busy": covered(spans) / 1e6 / steps,
        "kernels": dearest(((event.name, end - start) for event, (start, end) in zip(on_device, spans)), steps),
    }


def dearest(spent: Iterable[tuple[str, float]], steps: int) -> list[dict[str, Any]]:
    """The twelve names with the most time.

    Args:
        spent: name and microseconds of each kernel and copy.

    Returns:
        Name, launches and microseconds per step, and share of the time of all kernels, the most time first.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, microseconds in spent:
        found[name].append(microseconds)
    total = sum(map(sum, found.values())) or 1.0
    ranked = sorted(found, key=lambda name: sum(found[name]), reverse=True)[:_DEAREST]
    return [
        dict(name=name, launches=len(found[name]) / steps, microseconds=sum(found[name]) / steps,
             share=sum(found[name]) / total)
        for name in ranked
    ]  # fmt: skip


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
