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
_Row = dict[str, Any]


def draw(record: dict[str, Any], path: Path) -> None:
    """Panels: latency over size and load, incidents, and where affinity stops paying."""
    from matplotlib.figure import Figure

    rows = record["cells"]
    figure = Figure(figsize=(13.5, 12), layout="constrained")
    axes = figure.subplots(3, 3)
    for column, scenario in enumerate(("prefix-heavy", "month-end")):
        rate = record["rates"][scenario]
        by_size = _of(rows, part="size", scenario=scenario)
        title = f"{scenario}, {rate:g} requests/s and replica"
        _lines(axes[0][column], by_size, "replicas", lambda row: row["ttft_p99"], title, "TTFT p99 (s)")
        axes[0][column].set_xscale("log", base=2)
        axes[0][column].set_xticks(sorted({row["replicas"] for row in by_size}) or [8])
        axes[0][column].xaxis.set_major_formatter("{x:g}")
        by_load = _of(rows, part="load", scenario=scenario)
        _lines(axes[1][column], by_load, "rate", _good, f"{scenario}, 16 replicas", "good requests (%)")
        axes[1][column].set_xlabel("requests/s and replica")
        axes[1][column].set_ylim(0, 103)
        axes[1][column].axhline(100 * record["slo"]["attainment"], color="#888", linewidth=0.8, linestyle=":")
    by_size = _of(rows, part="size", scenario="prefix-heavy")
    _lines(axes[0][2], by_size, "replicas", lambda row: 100 * row["prefix_hits"], "prefix-heavy", "cached (%)")
    axes[0][2].set_xscale("log", base=2)
    axes[0][2].set_xticks(sorted({row["replicas"] for row in by_size}) or [8])
    axes[0][2].xaxis.set_major_formatter("{x:g}")
    _incidents(axes[1][2], rows)
    prefixes = _of(rows, part="prefixes")
    _lines(axes[2][0], prefixes, "prefixes", lambda row: row["ttft_p99"], "prefix-heavy, 16 replicas", "TTFT p99 (s)")
    axes[2][0].set_xscale("log", base=2)
    axes[2][0].set_xlabel("distinct prefixes per replica")
    _factors(axes[2][1], _of(rows, part="load factor"))
    _scrapes(axes[2][2], _of(rows, part="scrape"))
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


def _lines(axes: Any, rows: Sequence[_Row], over: str, value: Callable[[_Row], float], title: str, unit: str) -> None:
    """A line per router."""
    for router, colour in COLOURS.items():
        points = sorted((row[over], value(row)) for row in rows if row["router"] == router)
        if points:
            axes.plot(*zip(*points), color=colour, marker="o", markersize=3.5, label=router)
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit, fontsize=9)
    axes.set_xlabel(over, fontsize=9)
    if "%" not in unit:
        axes.set_yscale("log")


def _incidents(axes: Any, rows: Sequence[_Row]) -> None:
    """Good requests while an incident lasts."""
    groups = [(scenario, kind) for kind in ("kill", "rollout") for scenario in ("prefix-heavy", "month-end")]
    for place, (scenario, kind) in enumerate(groups):
        for offset, (router, colour) in enumerate(COLOURS.items()):
            found = _of(rows, part="incident", scenario=scenario, incident=kind, router=router, replicas=64)
            if found:
                axes.bar(place + 0.2 * offset - 0.3, _good(found[0]["during"]), 0.18, color=colour)
    axes.set_xticks(range(len(groups)), [f"{kind},\n{scenario}" for scenario, kind in groups], fontsize=8)
    axes.set_title("64 replicas, while the incident lasts", fontsize=10)
    axes.set_ylabel("good requests (%)", fontsize=9)
    axes.set_ylim(0, 103)


def _factors(axes: Any, rows: Sequence[_Row]) -> None:
    for prefixes, style in zip(sorted({row["prefixes"] for row in rows}), ("--", "-")):
        points = sorted((min(row["load_factor"], 8.0), row["ttft_p99"]) for row in rows if row["prefixes"] == prefixes)
        axes.plot(
            *zip(*points),
            style,
            color=COLOURS["prefix-affinity"],
            marker="o",
            markersize=3.5,
            label=f"{prefixes:g} prefixes per replica",
        )
    axes.set_title("prefix-affinity, 16 replicas (8: no bound)", fontsize=10)
    axes.set_xlabel("load factor", fontsize=9)
    axes.set_ylabel("TTFT p99 (s)", fontsize=9)
    axes.set_yscale("log")
    if rows:
        axes.legend(fontsize=8, frameon=False)


def _scrapes(axes: Any, rows: Sequence[_Row]) -> None:
    for replicas, style in ((8, "--"), (64, "-")):
        points = sorted((max(row["scrape"], 0.01), row["ttft_p99"]) for row in rows if row["replicas"] == replicas)
        if points:
            axes.plot(
                *zip(*points),
                style,
                color=COLOURS["least-waiting"],
                marker="o",
                markersize=3.5,
                label=f"{replicas} replicas",
            )
    axes.set_title("least-waiting, month-end", fontsize=10)
    axes.set_xlabel("seconds between scrapes (0.01: always current)", fontsize=9)
    axes.set_ylabel("TTFT p99 (s)", fontsize=9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    if rows:
        axes.legend(fontsize=8, frameon=False)
