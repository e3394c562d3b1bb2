"""The resources that the processes of a server hold while no request is open."""

from __future__ import annotations

import contextlib
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil

from inflight_tools.launcher import TritonServer
from inflight_tools.processes import STUB_NAME, session_members
from loadtest.monitor import gauges

__all__ = ["Held", "Idle", "leaks", "measure"]

_MIB = 2**20
# Allowed differences between two idle moments: allocators and thread pools grow for a while.
_MAX_GROWTH = {"rss": (0.15, 48 * _MIB), "fds": (0.0, 8), "threads": (0.0, 8)}


@dataclass
class Held:
    """The resources of all processes of one kind; `rss` in bytes."""

    processes: int = 0
    rss: int = 0
    fds: int = 0
    threads: int = 0

    def __str__(self) -> str:
        return f"{self.rss / _MIB:.0f} MiB, {self.fds} fds, {self.threads} threads"


@dataclass
class Idle:
    """The resources of a server at a moment without open requests.

    Attributes:
        by_kind: its processes: "server", "stubs" and "engines".
        shm: files and bytes in /dev/shm.
        blocks: KV blocks that sequences hold.
        sequences: running and waiting ones.
        counters: the model's counters by name and labels.
    """

    by_kind: dict[str, Held]
    shm: tuple[int, int]
    blocks: float
    sequences: float
    counters: dict[str, float]

    def is_settled(self, spare: bool) -> bool:
        """Whether the server is at rest: no sequence, no process that still ends, and the spare process, if there is
        one, has started."""
        processes = {kind: held.processes for kind, held in self.by_kind.items()}
        return not (self.blocks or self.sequences) and processes == {"server": 1, "stubs": 1, "engines": 1 + spare}


def measure(server: TritonServer, model: str) -> Idle:
    """Measure now.  Raises OSError if the metrics cannot be read."""
    assert server.process is not None
    by_kind = {"server": Held(), "stubs": Held(), "engines": Held()}
    for pid in session_members(server.process.pid):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            process = psutil.Process(pid)
            stub = process.name().startswith(STUB_NAME)
            held = by_kind["server" if pid == server.process.pid else "stubs" if stub else "engines"]
            held.processes += 1
            held.rss += process.memory_info().rss
            held.fds += process.num_fds()
            held.threads += process.num_threads()
    files = [path.stat().st_size for path in Path("/dev/shm").glob(f"{server.shm_prefix}*")]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{server.metrics_address}/metrics", timeout=10) as response:
        text = response.read().decode()
    now, counters = gauges(text, model), dict[str, float]()
    for series, value in re.findall(r"^([a-z_:]+_total\{[^}]*\}) (\S+)$", text, re.MULTILINE):
        if f'model="{model}"' in series:
            counters[series] = float(value)
    return Idle(by_kind, (len(files), sum(files)), now["kv_used"], now["running"] + now["waiting"], counters)


def leaks(early: Idle, late: Idle) -> list[str]:
    """Resources that grew between the two moments, and blocks or sequences that are still held."""
    found = []
    for kind, before in early.by_kind.items():
        after = late.by_kind[kind]
        if after.processes != before.processes:
            found.append(f"{kind}: {before.processes} processes became {after.processes}")
        for name, (share, slack) in _MAX_GROWTH.items():
            was, now = getattr(before, name), getattr(after, name)
            if now > was * (1 + share) + slack:
                found.append(f"{kind}: {name} grew from {was:,} to {now:,}")
    if late.shm[0] > early.shm[0] or late.shm[1] > early.shm[1] + _MIB:
        found.append(f"/dev/shm: {early.shm} became {late.shm} (files, bytes)")
    if late.blocks or late.sequences:
        found.append(f"without requests, {late.blocks:.0f} KV blocks and {late.sequences:.0f} sequences are held")
    for series, value in early.counters.items():
        if late.counters.get(series, 0.0) < value:
            found.append(f"the counter {series} fell from {value:g} to {late.counters.get(series, 0.0):g}")
    return found
