"""Builds `report.json` from the phases of a run: all that the page shows, so that it computes nothing."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from inflight_tools.workload.scenarios import Scenario
from inflight_tools.workload.slo import SLO
from loadtest.analysis import Phase, knee, summary, values_of
from loadtest.remarks import remarks
from loadtest.runner import Results, sweep_process

__all__ = ["build", "machine", "versions", "write"]

_MAX_POINTS = 600  # of a scatter plot
_BINS = 40  # of tokens over time
_PACKAGES = ("triton-inflight", "torch", "transformers", "tritonclient", "locust", "nvidia-pytriton")
# Required ratios on CPU cores: tokens/s at saturation, and p95 time to first text at 40 users.
_TARGETS = {"lognormal": {"tokens_per_second": 3.1}, "month-end": {"ttft_p95": 6.0}}


def build(results: Results, command: str, notes: list[str]) -> dict[str, Any]:
    """The report of a run as plain values.

    Args:
        command: repeats the run.
        notes: sentences below the ratio table.
    """
    plan, source, targets = results.plan, results.source, results.targets
    constant = plan.load.process() == "closed" and not (isinstance(source, Scenario) and source.ramp)
    keys = [target.key for target in targets]
    models = {key: summary(results.rounds[key], plan.slo, constant) for key in keys}
    cores = len(os.sched_getaffinity(0))
    rounds = len(results.rounds[keys[0]])
    # The offered load of a step depends on its few requests, so steps can change places.
    sweep = {
        key: sorted((_sweep_point(phase, plan.slo) for phase in results.sweep[key]), key=lambda p: p["offered"])
        for key in keys
    }
    return {
        "scenario": {
            "name": source.name,
            "about": getattr(source, "about", "a replayed trace"),
            "longest": source.longest,
        },
        "sides": [{"key": target.key, "name": target.name, "about": target.about} for target in targets],
        "against_batcher": plan.against_batcher,
        "checkpoint": plan.checkpoint,
        "command": command,
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        "machine": machine() if not plan.targets else f"load from {machine()}",
        "versions": {"python": platform.python_version(), **versions()},
        "options": "" if plan.targets else json.dumps(plan.options),
        "threads": "" if plan.targets else _THREADS,
        "rounds": rounds,
        "load": _load_text(results),
        "slo": {"ttft": plan.slo.ttft, "tpot": plan.slo.tpot, "attainment": plan.slo.attainment},
        "ratios": _ratios(models, _TARGETS.get(source.name, {}) if plan.against_batcher else {}),
        "notes": [*remarks(results, models, cores), *notes],
        "throughput_means": _THROUGHPUT[constant],
        "models": models,
        "runs": [
            _run_row(number + 1, key, results.rounds[key][number], constant) for number in range(rounds) for key in keys
        ],
        "timeline": {key: _timeline(results.rounds[key][-1], cores) for key in keys},
        "timeline_of": f"Round {rounds}, each side from the start of its load.",
        "sweep": sweep if any(sweep.values()) else None,
        "sweep_process": sweep_process(plan.load),
        "knee": {key: knee(points) for key, points in sweep.items()},
    }


_THREADS = (
    "Waiting threads of both models yield (OMP_WAIT_POLICY=PASSIVE), since the load generator shares their cores."
)
_THROUGHPUT = {
    True: "tokens/s covers the time in which every user had a request open, from the start to the last token that "
    "arrived before the last request was sent; median of the rounds. Percentiles are over all requests of all rounds.",
    False: "tokens/s covers the time from the start to the last token; median of the rounds. Percentiles are over all "
    "requests of all rounds.",
}


def _load_text(results: Results) -> str:
    plan, source, process = results.plan, results.source, results.plan.load.process()
    count = f"{len(results.rounds[results.targets[0].key][0].rows)} requests per round"
    if process == "closed":
        users = plan.users or getattr(source, "users", 40)
        ramp = getattr(source, "ramp", ())
        return f"{users} users at the peak of a ramp of {sum(ramp):g} s" if ramp else f"{users} users, {count}"
    return f"open loop, {process} arrivals, {count}"


def write(data: dict[str, Any], folder: Path) -> Path:
    """Write `report.json` and `report.html`; returns the page."""
    from loadtest.report import render

    (folder / "report.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    page = folder / "report.html"
    page.write_text(render(data), encoding="utf-8")
    return page


def _ratios(models: dict[str, Any], claims: dict[str, float]) -> list[dict[str, Any]]:
    """The rows of the first table; with two sides, the ratio says how much better the first one is."""
    found = []

    def add(key: str, what: str, values: list[float | None], unit: str, lower: bool) -> None:
        ratio = None
        if len(values) == 2 and values[0] and values[1]:
            ratio = values[1] / values[0] if lower else values[0] / values[1]
        row = {"key": key, "what": what, "values": dict(zip(models, values)), "unit": unit, "ratio": ratio}
        found.append({**row, "target": claims.get(key)})

    def of(key: str) -> list[float | None]:
        return [model[key] for model in models.values()]

    def percentile(metric: str, which: str) -> list[float | None]:
        tables = [model["all"][metric] for model in models.values()]
        return [values[which] if values else None for values in tables]

    add("tokens_per_second", "output tokens/s", of("tokens_per_second"), "", False)
    add("goodput", "goodput: requests/s within the SLO", of("goodput"), "", False)
    add("attainment", "requests within the SLO", of("attainment"), "share", False)
    for which in ("p50", "p95"):
        add(f"ttft_{which}", f"time to first text, {which}", percentile("ttft", which), "s", True)
    for which in ("p50", "p95"):
        add(f"latency_{which}", f"latency of the whole answer, {which}", percentile("latency", which), "s", True)
    lost = {key: model["lost"] for key, model in models.items()}
    found.append({"key": "lost", "what": "requests lost", "values": lost, "unit": "", "ratio": None, "target": None})
    return found


def _sweep_point(phase: Phase, slo: SLO) -> dict[str, float]:
    """A point of the sweep; loads in output tokens per second."""
    ttft = sorted(values_of(phase.done, "ttft")) or [0.0]
    return {
        "offered": phase.offered_tokens_per_second,
        "delivered": phase.tokens_per_second,
        "ttft_p95": ttft[min(len(ttft) - 1, round(0.95 * (len(ttft) - 1)))],
        "attainment": phase.attainment(slo),
        "lost": phase.lost,
    }


def _run_row(number: int, name: str, phase: Phase, constant: bool) -> dict[str, Any]:
    return {
        "round": number,
        "model": name,
        "requests": len(phase.rows),
        "lost": phase.lost,
        "tokens": phase.tokens,
        "seconds": phase.seconds,
        "tokens_per_second": phase.saturated_tokens_per_second if constant else phase.tokens_per_second,
        "client_cores": phase.mean("client_cores"),
    }


def _timeline(phase: Phase, cores: int) -> dict[str, list[tuple[float, float]]]:
    stride = -(-len(phase.rows) // _MAX_POINTS) or 1
    rows = sorted(phase.done, key=lambda row: row["start"])[::stride]
    width = max(0.5, round(phase.seconds / _BINS, 1))
    bins = [0] * (int(phase.seconds / width) + 1)
    for row in phase.rows:
        for at, count in row["arrivals"]:
            bins[min(len(bins) - 1, int((row["start"] + at) / width))] += count
    samples = [
        (round(at, 2), sample) for sample in phase.samples if 0 <= (at := sample["time"] - phase.begun) <= phase.seconds
    ]

    def of(value: Any) -> list[tuple[float, float]]:
        return [(at, round(found, 4)) for at, sample in samples if (found := value(sample)) is not None]

    def kv(sample: dict[str, Any]) -> float | None:
        if "kv_used" not in sample:
            return sample.get("kv_share")
        return sample["kv_used"] / max(1.0, sample["kv_used"] + sample.get("kv_free", 0.0))

    return {
        "latency": [(row["start"], row["latency"]) for row in rows],
        "textless": _textless(phase),
        "tokens": [(round((slot + 0.5) * width, 3), count / width) for slot, count in enumerate(bins)],
        # Inflight takes requests out of Triton's queue at once; they wait in its scheduler.
        "queue": of(lambda sample: sample.get("waiting", sample.get("pending"))),
        "server_cores": of(lambda sample: sample["server_cores"] / cores if "server_cores" in sample else None),
        "kv": of(kv),
        "gpu": of(lambda sample: sample.get("gpu")),
    }


def _textless(phase: Phase) -> list[tuple[float, int]]:
    """Over time, the number of requests that were sent and had no text yet."""
    sent = np.array([row["start"] for row in phase.rows])
    waits = [row["arrivals"][0][0] if row["arrivals"] else row["latency"] for row in phase.rows]
    times = np.linspace(0, phase.seconds, 200)
    return [(round(float(at), 3), int((sent <= at).sum() - (sent + waits <= at).sum())) for at in times]


def machine() -> str:
    """The processor, and the number of cores that this process may use."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
