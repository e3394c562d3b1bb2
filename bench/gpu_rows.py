"""The rows of bench/gpu.py: the settings of a stage, the file that its rows go to, and a row as a line of a table.

Only the standard library is used, so that the process that starts the stages holds nothing on the card.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common

__all__ = ["Run", "about", "append", "file_name", "kernel_lines", "line", "read", "require_packages", "write_record"]

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec")
_SCALES = {"bytes/s": (1e9, "GB/s"), "FLOP/s": (1e12, "TFLOP/s")}
# Parts of a row that follow its rate, and how they are written.
_NOTES = {
    "over_flash": "{:.2f} x torch's flash",
    "over_torch": "{:.1f} x torch",
    "over_fp8": "{:.1f} x fp8",
    "over_bytes": "{:.2f} x bytes",
    "over_parts": "{:.2f} x GEMMs and KV",
    "over_roofline": "{:.2f} x max(bytes, FLOPs)",
    "launches": "{:.0f} launches",
    "gpu_idle": "GPU idle {:.1%}",
    "tokens_per_second": "{:.0f} tokens/s",
    "note": "{}",
    "target": "target {:g}",
}


@dataclass(frozen=True)
class Run:
    """The settings of a stage.

    Attributes:
        device: "cuda" or "cpu".
        tiny: toy shapes, to show that the stage works; times mean nothing.
        deadline: on `time.monotonic()`; a row that cannot be measured until then is left out.
        file: the rows of this run of bench/gpu.py so far, one JSON object a line.
    """

    device: str
    tiny: bool
    deadline: float
    file: Path

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def rows_so_far(self) -> list[dict[str, Any]]:
        return read(self.file)


def require_packages() -> None:
    """Raises: SystemExit, with what to do, if a package is not found that images for torch lack."""
    if missing := [name for name in ("msgspec", "xxhash") if find_spec(name) is None]:
        names = " ".join(missing)
        sys.exit(f"not found: {names}; pip install --target DIR {names} and put DIR on PYTHONPATH (docs/gpu.md)")


def about(device: str) -> dict[str, Any]:
    """The origin of a row: card, date, versions.  Imports torch on a GPU."""
    card = "cpu"
    if device == "cuda":
        import torch

        card = torch.cuda.get_device_name()
    versions = {"python": platform.python_version()} | common.versions(*_PACKAGES)
    return {"card": card, "date": date.today().isoformat(), "versions": versions}


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to the file and flush it: a process that is killed later loses none."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All complete rows of the file; none if there is no such file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(text) for text in lines if text.endswith("\n")]


def file_name(what: str, card: str) -> str:
    """Such as `gpu_all_h200.json`."""
    return f"gpu_{what}_{re.sub(r'[^a-z0-9]+', '-', card.lower().removeprefix('nvidia ')).strip('-')}.json"


def folder() -> Path:
    """Where records go unless `--output` says otherwise."""
    return Path(os.environ.get("OUT") or ROOT / "bench" / "results" / "gpu")


def write_record(output: Path | None, what: str, content: dict[str, Any]) -> Path:
    """Write `content` with the command that made it.

    Args:
        output: a file if it ends in .json, else a folder; None is `folder()`.
        content: its "card" names the file.
    """
    path = output if output and output.suffix == ".json" else (output or folder()) / file_name(what, content["card"])
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": " ".join(["python", "bench/gpu.py", *sys.argv[1:]])} | content
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def line(row: dict[str, Any]) -> str:
    """A row of the table: name, shape, time, achieved value and limit, notes and verdict."""
    head = f"{row['name']:<31} {row['shape']:<44}"
    if "status" in row:
        return f"{head} {row['status']}: {row['why']}"
    spent = f"{row['microseconds']:9.1f} us" if "microseconds" in row else " " * 12
    notes = ", ".join(text.format(row[name]) for name, text in _NOTES.items() if row.get(name) is not None)
    verdict = {True: "met", False: "MISSED", None: ""}[row.get("passed")]
    return f"{head} {spent} {_reached(row):<36} {notes} {verdict}".rstrip()


def kernel_lines(row: dict[str, Any]) -> list[str]:
    """The row's dearest kernels, one a line; none if it was not profiled."""
    line = "    {microseconds:9.1f} us  {share:4.0%}  {launches:6.1f} x  {name:.100}"
    return [line.format(**kernel) for kernel in row.get("kernels", [])]


def _reached(row: dict[str, Any]) -> str:
    """The achieved value, the limit if there is one, and their ratio."""
    achieved, limit, unit = row["achieved"], row.get("limit"), row["unit"]
    if unit == "error":
        return f"{achieved:.1e} of {limit:.1e} allowed"
    if unit == "tokens":
        return f"{achieved} differ"
    if unit == "tests":
        return f"{achieved} of {limit} passed"
    scale, unit = _SCALES.get(unit, (1.0, unit))
    if limit is None:
        return f"{achieved / scale:8.1f} {unit}"
    return f"{achieved / scale:8.1f} of {limit / scale:8.1f} {unit:<7} {row['ratio']:5.2f}"
