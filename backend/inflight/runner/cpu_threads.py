"""How many threads this process may use: its affinity and its container's CPU quota.  No torch.

torch starts a thread for each core of the machine, even if a container's quota allows fewer.  Threads beyond the
quota do not share it, they wait for each other at every barrier: 16 threads on 2 cores take 7 times as long a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_cpus"]


def available_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may use: the smaller of its affinity and its quota, rounded down; at least 1.

    Args:
        root: where /proc and /sys are.
    """
    affinity = len(os.sched_getaffinity(0))
    return max(1, min([affinity, *map(int, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """The CPU quotas of this process's control groups and of those above them, in CPUs.

    See cgroups(7), and `cpu.max` in the kernel's cgroup-v2.rst.  In a container the path may be that of the host: what
    does not exist is passed over, up to the root, which is the container's own group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            for group in _with_parents(root / "sys/fs/cgroup", path):
                yield from _quota(*_read(group / "cpu.max", 2))
        elif "cpu" in controllers.split(","):
            for mount in (controllers, "cpu"):
                for group in _with_parents(root / "sys/fs/cgroup" / mount, path):
                    yield from _quota(*_read(group / "cpu.cfs_quota_us", 1), *_read(group / "cpu.cfs_period_us", 1))


def _with_parents(mount: Path, path: str) -> Iterator[Path]:
    group = mount / path.lstrip("/")
    yield group
    while group != mount and mount in group.parents:
        group = group.parent
        yield group


def _read(path: Path, count: int) -> list[str]:
    try:
        return path.read_text().split()[:count]
    except OSError:
        return []


def _quota(quota: str = "max", period: str = "") -> Iterator[float]:
    """Microseconds of CPU time in a period of so many; "max" or -1: no limit."""
    if period and quota.lstrip("-").isdigit() and int(quota) > 0:
        yield int(quota) / int(period)
