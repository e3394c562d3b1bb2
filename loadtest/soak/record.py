"""The record of a soak: what ran, where, how it ended and how long each step of an event took."""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

from loadtest.results import machine, versions
from loadtest.soak.run import Plan, Verdict

__all__ = ["write"]


def write(path: Path, plan: Plan, verdict: Verdict) -> None:
    """Write it as JSON; the folder must exist.

    Raises:
        OSError: the file cannot be written.
    """
    record = {
        "command": " ".join(["python -m loadtest.soak", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions()},
        "plan": asdict(plan),
        "report": verdict.lines(),
        "waits": {what: [round(one, 3) for one in seconds] for what, seconds in verdict.waits.items()},
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
