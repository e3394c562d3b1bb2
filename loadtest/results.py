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
    plan, source = results.plan, results.source
    ours, theirs = plan.models
    constant = plan.load.process() == "closed" and not (isinstance(source, Scenario) and source.ramp)
    names = {"inflight": ours, "baseline": theirs}
    models = {name: summary(results.rounds[model], plan.slo, constant) for name, model in names.items()}
    cores = len(os.sched_getaffinity(0))
    last = {name: results.rounds[model][-1] for name, model in names.items()}
    # The offered load of a step depends on its few requests, so steps can change places.
    sweep = {
        name: sorted((_sweep_point(phase, plan.slo) for phase in results.sweep[model]), key=lambda p: p["offered"])
        for name, model in names.items()
    }
    return {
        "scenario": {
            "name": source.name,
            "about": getattr(source, "about", "a replayed trace"),
            "longest": source.longest,
        },
        "checkpoint": plan.checkpoint,
        "command": command,
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions()},
        "options": json.dumps(plan.options),
        "threads": "" if plan.endpoints else _THREADS,
        "rounds": len(results.rounds[ours]),
        "load": _load_text(results),
        "slo": {"ttft": plan.slo.ttft, "tpot": plan.slo.tpot},
        "ratios": _ratios(models, _TARGETS.get(source.name, {})),
        "notes": [*_remarks(models, cores), *notes],
        "throughput_means": _THROUGHPUT[constant],
        "models": models,
        "runs": [
            _run_row(number + 1, name, results.rounds[model][number], constant)
            for number in range(len(results.rounds[ours]))
            for name, model in names.items()
        ],
        "timeline": {name: _timeline(phase, cores) for name, phase in last.items()},
        "timeline_of": f"Round {len(results.rounds[ours])}, each model from the start of its load.",
        "sweep": sweep if sweep["inflight"] else None,
        "sweep_process": sweep_process(plan.load),
        "knee": {name: knee(points) for name, points in sweep.items()},
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
    count = f"{len(results.rounds[plan.models[0]][0].rows)} requests per round"
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


def _ratios(models: dict[str, Any], targets: dict[str, float]) -> list[dict[str, Any]]:
    ours, theirs = models["inflight"], models["baseline"]
    found = []

    def add(key: str, what: str, a: float | None, b: float | None, unit: str, lower: bool) -> None:
        ratio = None
        if a and b:
            ratio = b / a if lower else a / b
        found.append({"key": key, "what": what, "inflight": a, "baseline": b, "unit": unit, "ratio": ratio,
                      "target": targets.get(key)})  # fmt: skip

    def percentile(model: dict[str, Any], metric: str, which: str) -> float | None:
        values = model["all"][metric]
        return values[which] if values else None

    add("tokens_per_second", "output tokens/s", ours["tokens_per_second"], theirs["tokens_per_second"], "", False)
    add("goodput", "goodput: requests/s within the SLO", ours["goodput"], theirs["goodput"], "", False)
    add("attainment", "requests within the SLO", ours["attainment"], theirs["attainment"], "share", False)
    for which in ("p50", "p95"):
        pair = percentile(ours, "ttft", which), percentile(theirs, "ttft", which)
        add(f"ttft_{which}", f"time to first text, {which}", *pair, "s", True)
    for which in ("p50", "p95"):
        pair = percentile(ours, "latency", which), percentile(theirs, "latency", which)
        add(f"latency_{which}", f"latency of the whole answer, {which}", *pair, "s", True)
    found.append({"key": "lost", "what": "requests lost", "inflight": ours["lost"], "baseline": theirs["lost"],
                  "unit": "", "ratio": None, "target": None})  # fmt: skip
    return found


def _remarks(models: dict[str, Any], cores: int) -> list[str]:
    """Notes that a reader needs to judge the table."""
    remarks = []
    for name, model in models.items():
        who = "Inflight" if name == "inflight" else "The baseline"
        if model["server_cores"] is not None:
            text = f"{who} kept {model['server_cores'] / cores * 100:.0f}% of the {cores} cores busy"
            if model["client_cores"] is not None:
                text += f", the load generator beside it {model['client_cores'] / cores * 100:.0f}%"
            if model["gpu"] is not None:
                text += f"; the GPU was busy {model['gpu'] * 100:.0f}% of the time"
            remarks.append(text + ".")
        if model["lost"]:
            remarks.append(f"{who} lost {model['lost']} requests: {'; '.join(model['errors']) or 'they never ended'}.")
    return remarks


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
            return None
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
