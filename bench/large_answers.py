#!/usr/bin/env python3
"""Memory that a server keeps after large answers: its processes and its shared memory.

    python bench/large_answers.py [--rounds 2] [--output FILE]

A round is three unstreamed answers of 48 sequences with 100 log probabilities a token (136 MiB each), and then three
times eight prompts of 2,040 tokens with their log probabilities.  Resident memory is without shared memory, after a
pause in which the stub returns what it no longer needs.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import common
import fairness
import serving

SETTLE = 2.5  # seconds
SHARED = Path("/dev/shm")


def resident(pid: int) -> float:
    """MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(found) for found in re.findall(r"Rss(?:Anon|File):\s+(\d+)", status)) / 1024


class Watched:
    """The processes of a server, and what they have in shared memory."""

    def __init__(self, server: Any, others: set[str]) -> None:
        from inflight_tools.processes import session_members

        self._others = others
        self._pids = {pid: serving.kind_of(pid) for pid in session_members(server.process.pid)}

    def look(self, label: str) -> dict[str, Any]:
        time.sleep(SETTLE)
        found: dict[str, Any] = {"after": label}
        for role in ("server", "stub", "engine"):
            pids = [pid for pid, of in self._pids.items() if of == role]
            found[role] = round(max(map(resident, pids)), 1)
            found[f"{role}_descriptors"] = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
        files = [SHARED / name for name in set(os.listdir(SHARED)) - self._others]
        found["shared"] = round(sum(file.stat().st_blocks * 512 for file in files) / 2**20, 1)
        columns = (found[key] for key in ("server", "stub", "engine", "shared"))
        descriptors = "/".join(str(found[f"{role}_descriptors"]) for role in ("server", "stub", "engine"))
        print(f"{label:<34}" + "".join(f"{value:>9.1f}" for value in columns) + f"{descriptors:>14}", flush=True)
        return found


def ask(address: str, requests: list[dict[str, Any]], salt: str) -> None:
    stream = serving.Streams(address, "demo")
    for number, wanted in enumerate(requests):
        stream.submit({**wanted, "cache_salt": f"{salt}-{number}"})
    stream.wait(len(requests))
    stream.close()


def main() -> None:
    from inflight_tools.launcher import TritonServer

    args = common.options(__doc__, rounds=2)
    kinds = fairness.kinds()
    others = set(os.listdir(SHARED))
    print(f"{'MiB after':<34}{'server':>9}{'stub':>9}{'engine':>9}{'shared':>9}{'descriptors':>14}")
    server = TritonServer(fairness.REPOSITORY, model_control_mode="explicit", load_models=["demo"], exit_timeout=2)
    with server:
        watched = Watched(server, others)
        runs = [watched.look("start")]
        for number in range(1, args.rounds + 1):
            for turn in range(3):
                ask(server.grpc_address, kinds["logprobs_late"].expensive, f"{number}-{turn}")
                if (number, turn) == (1, 0):
                    runs.append(watched.look("one answer"))
            runs.append(watched.look(f"three answers of round {number}"))
            for turn in range(3):
                ask(server.grpc_address, kinds["prompt_logprobs"].expensive, f"{number}-{turn}")
            runs.append(watched.look(f"round {number}"))
    common.record(args, runs)


if __name__ == "__main__":
    main()
