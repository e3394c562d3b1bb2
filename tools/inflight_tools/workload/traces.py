"""Replay of recorded traffic: arrival, prompt tokens and output tokens from a CSV or JSONL file.

Known columns; the first set that is present is used:

- Azure LLM inference traces (CSV): `TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens`
- Mooncake traces (JSONL): `timestamp` (milliseconds), `input_length`, `output_length`, `hash_ids`
- plain: `arrival` (seconds), `prompt_tokens`, `output_tokens`
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from inflight_tools.workload.errors import WorkloadError
from inflight_tools.workload.scenarios import Job

__all__ = ["TrafficTrace", "read_trace"]

# Arrival column, prompt column, output column, seconds per unit of the arrival column.
_FORMATS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens", 1.0),
    ("timestamp", "input_length", "output_length", 1e-3),
    ("arrival", "prompt_tokens", "output_tokens", 1.0),
)
_CLASSES = ((512, "under 512"), (2048, "512 to 2K"), (8192, "2K to 8K"))
_HASH_BLOCK = 512  # tokens per hash id in Mooncake's traces


@dataclass(frozen=True)
class TrafficTrace:
    """Recorded requests in order of arrival; takes the place of a `Scenario`."""

    name: str
    jobs: tuple[Job, ...]

    @property
    def longest(self) -> int:
        return max(job.prompt_tokens + job.output_tokens for job in self.jobs)

    @property
    def longest_prompt(self) -> int:
        return max(job.prompt_tokens for job in self.jobs)

    def job(self, index: int, seed: int) -> Job:
        return self.jobs[index]

    def at_speed(self, speed: float) -> TrafficTrace:
        """The same requests, `speed` times as fast."""
        if not speed > 0:
            raise WorkloadError(f"speed {speed:g}: must be above 0")
        jobs = (dataclasses.replace(job, due=(job.due or 0.0) / speed) for job in self.jobs)
        return dataclasses.replace(self, jobs=tuple(jobs))

    def scaled(self, context: int) -> TrafficTrace:
        """The same requests with all lengths reduced by one factor, so that the longest fits `context` tokens."""
        factor = min(1.0, context / self.longest)

        def scale(job: Job) -> Job:
            prompt, output = max(1, int(job.prompt_tokens * factor)), max(1, int(job.output_tokens * factor))
            return dataclasses.replace(
                job, prompt_tokens=prompt, output_tokens=output, hash_ids=job.hash_ids[: -(-prompt // _HASH_BLOCK)]
            )

        return dataclasses.replace(self, jobs=tuple(map(scale, self.jobs)))


def read_trace(path: Path, limit: int | None = None) -> TrafficTrace:
    """Read a trace; arrivals are relative to the first one.

    Args:
        path: CSV with a header line, or one JSON object per line (`.jsonl`, `.json`).
        limit: read only this many requests.

    Raises:
        WorkloadError: no such file, no known columns, an unreadable row, or no request.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = _json_rows(file, path) if path.suffix in (".jsonl", ".json") else csv.DictReader(file)
            found = []
            for number, row in enumerate(rows, 1):
                found.append(_request(row, f"{path}, request {number}"))
                if len(found) == limit:
                    break
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise WorkloadError(f"trace {path}: {reason}; give a CSV or JSONL file") from None
    found = [entry for entry in found if entry[1] > 0 and entry[2] > 0]
    if not found:
        raise WorkloadError(f"trace {path}: contains no request; give a CSV or JSONL file with at least one")
    found.sort(key=lambda entry: entry[0])
    first = found[0][0]
    jobs = [
        Job(index, _class_of(prompt), prompt, output, due=arrival - first, hash_ids=hashes)
        for index, (arrival, prompt, output, hashes) in enumerate(found)
    ]
    return TrafficTrace(path.name, tuple(jobs))


def _json_rows(lines: Any, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise WorkloadError(f"trace {path}, line {number}: not a JSON object; give one request per line")
            yield row


def _request(row: dict[str, Any], where: str) -> tuple[float, int, int, tuple[int, ...]]:
    for arrival, prompt, output, unit in _FORMATS:
        if arrival in row and prompt in row and output in row:
            try:
                hashes = tuple(map(int, row.get("hash_ids") or ()))
                return _seconds(row[arrival], unit), int(row[prompt]), int(row[output]), hashes
            except (ValueError, TypeError, OverflowError):
                raise WorkloadError(
                    f"{where}: cannot read {arrival}={row[arrival]!r}, {prompt}={row[prompt]!r}, "
                    f"{output}={row[output]!r}; expected a time and two numbers of tokens"
                ) from None
    known = "; ".join(", ".join(columns[:3]) for columns in _FORMATS)
    raise WorkloadError(f"{where}: unknown columns {', '.join(map(str, row))}; expected one of: {known}")


def _seconds(value: Any, unit: float) -> float:
    try:
        seconds = float(value) * unit
    except ValueError:
        # Azure writes seven fractional digits, which fromisoformat of Python 3.10 does not accept.
        text = re.sub(r"(\.\d{6})\d+", r"\1", str(value).strip())
        text = re.sub(r"\.(\d{1,5})(?=$|[+-])", lambda match: "." + match[1].ljust(6, "0"), text)
        stamp = datetime.fromisoformat(text)
        seconds = (stamp if stamp.tzinfo else stamp.replace(tzinfo=timezone.utc)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(value)
    return seconds


def _class_of(prompt_tokens: int) -> str:
    return next((name for bound, name in _CLASSES if prompt_tokens < bound), "8K and more")
