"""The curves of `bench/fleet_simulated.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COLOURS = {
    "round-robin": "#c8553d",
    "least-waiting": "#e0a030",
    "least-loaded": "#5b7db1",
    "prefix-affinity": "#2a7f62",
}
TTFT = "TTFT p99 (s)"
_Row = dict[str, Any]
_Value = Callable[[_Row], float]


def draw(record: dict[str, Any], path: Path) -> None:
    """Panels: latency over size and load, incidents, and where affinity stops paying."""
    from matplotlib.figure import Figure

    rows = record["cells"]
    figure = Figure(figsize=(13.5, 12), layout="constrained")
    axes = figure.subplots(3, 3)
    for column, scenario in enumerate(("prefix-heavy", "month-end")):
        title = f"{scenario}, {record['rates'][scenario]:g} requests/s and replica"
        by_size = _of(rows, part="size", scenario=scenario)
        _by_router(axes[0][column], by_size, "replicas", _ttft, title, TTFT)
        by_load = _of(rows, part="load", scenario=scenario)
        _by_router(axes[1][column], by_load, "rate", _good, f"{scenario}, 16 replicas", "good requests (%)")
        axes[1][column].set_xlabel("requests/s and replica")
        axes[1][column].axhline(100 * record["slo"]["attainment"], color="#888", linewidth=0.8, linestyle=":")
    by_size = _of(rows, part="size", scenario="prefix-heavy")
    _by_router(axes[0][2], by_size, "replicas", lambda row: 100 * row["prefix_hits"], "prefix-heavy", "cached (%)")
    for each in axes[0]:
        each.set_xscale("log", base=2)
        each.set_xticks(sorted({row["replicas"] for row in by_size}) or [8])
        each.xaxis.set_major_formatter("{x:g}")
    _incidents(axes[1][2], rows)
    _by_router(axes[2][0], _of(rows, part="prefixes"), "prefixes", _ttft, "prefix-heavy, 16 replicas", TTFT)
    axes[2][0].set_xscale("log", base=2)
    axes[2][0].set_xlabel("distinct prefixes per replica")
    factors = _of(rows, part="load factor")
    lines = {
        f"{prefixes:g} prefixes per replica": [(min(row["load_factor"], 8.0), _ttft(row)) for row in own]
        for prefixes in sorted({row["prefixes"] for row in factors})
        if (own := _of(factors, prefixes=prefixes))
    }
    _lines(axes[2][1], lines, "prefix-affinity", "load factor", "prefix-affinity, 16 replicas (8: no bound)")
    lines = {
        f"{replicas} replicas": [(max(row["scrape"], 0.01), _ttft(row)) for row in own]
        for replicas in (8, 64)
        if (own := _of(rows, part="scrape", replicas=replicas))
    }
    xlabel = "seconds between scrapes (0.01: always current)"
    _lines(axes[2][2], lines, "least-waiting", xlabel, "least-waiting, month-end")
    axes[2][2].set_xscale("log")
    handles, labels = axes[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _of(rows: Sequence[_Row], **wanted: Any) -> list[_Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _good(row: _Row) -> float:
    return 100.0 * float(row["attainment"])


def _ttft(row: _Row) -> float:
    return float(row["ttft_p99"])


def _by_router(
    axes: Any, rows: Sequence[_Row], over: str, value: Callable[[_Row], float], title: str, unit: str
) -> None:
    """A line for each router."""
    for router, colour in COLOURS.items():
        points = sorted((row[over], value(row)) for row in rows if row["router"] == router)
        if points:
            axes.plot(*zip(*points), color=colour, marker="o", markersize=3.5, label=router)
    _label(axes, title, over, unit)


def _lines(axes: Any, lines: dict[str, list[tuple[float, float]]], router: str, over: str, title: str) -> None:
    """Lines of one router: TTFT by what is named."""
    for (name, points), style in zip(lines.items(), ("--", "-")):
        axes.plot(*zip(*sorted(points)), style, color=COLOURS[router], marker="o", markersize=3.5, label=name)
    _label(axes, title, over, TTFT)
    if lines:
        axes.legend(fontsize=8, frameon=False)


def _label(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    if "%" not in ylabel:
        axes.set_yscale("log")
    elif "good" in ylabel:
        axes.set_ylim(0, 103)


def _incidents(axes: Any, rows: Sequence[_Row]) -> None:
    """Good requests while an incident lasts."""
    groups = [(scenario, kind) for kind in ("kill", "rollout") for scenario in ("prefix-heavy", "month-end")]
    for place, (scenario, kind) in enumerate(groups):
        for offset, (router, colour) in enumerate(COLOURS.items()):
            found = _of(rows, part="incident", scenario=scenario, incident=kind, router=router, replicas=64)
            if found:
                axes.bar(place + 0.2 * offset - 0.3, _good(found[0]["during"]), 0.18, color=colour)
    axes.set_xticks(range(len(groups)), [f"{kind},\n{scenario}" for scenario, kind in groups], fontsize=8)
    _label(axes, "64 replicas, while the incident lasts", "", "good requests (%)")
