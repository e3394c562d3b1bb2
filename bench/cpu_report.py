"""The results of `bench/cpu.py`: medians and ratios, a table, the record, a plot."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

OURS = "inflight"
_GIB = 2**30
_WIDTHS = (10, 11, 10, 9, 7, 10, 8)


def summarise(runs: dict[str, list[dict[str, Any]]], floor: float | None) -> dict[str, dict[str, Any]]:
    """Per engine: medians, the ratio of ours to it, and its share of the floor.

    Args:
        runs: engine -> its runs, one per round, in order.
        floor: least seconds that the machine needs for the work, or None if unknown.
    """
    ours = runs.get(OURS, [])
    summary = {}
    for name, made in runs.items():
        if not made:
            continue
        # Round by round, so that drift of the machine affects both sides.
        ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(ours, made)]
        seconds = statistics.median(run["seconds"] for run in made)
        summary[name] = {
            "tokens_per_second": statistics.median(run["tokens_per_second"] for run in made),
            "ratio": statistics.median(ratios) if ratios else None,
            "floor_share": floor / seconds if floor is not None else None,
            "ready_seconds": statistics.median(run["ready_seconds"] for run in made),
            "busy_cores": statistics.median(run["cpu_seconds"] / run["seconds"] for run in made),
            "peak_rss": max(run["peak_rss"] for run in made),
            "rounds": len(made),
        }
    return summary


def table(summary: dict[str, dict[str, Any]], left_out: dict[str, str]) -> str:
    """The comparison as text, one engine per line, fastest first."""
    heads = zip(("tokens/s", "ours / it", "of floor", "ready s", "cores", "peak GiB", "rounds"), _WIDTHS)
    lines = [" " * 16 + "".join(f"{head:>{width}}" for head, width in heads)]
    for name, row in sorted(summary.items(), key=lambda item: -item[1]["tokens_per_second"]):
        ratio = f"{row['ratio']:.2f}" if row["ratio"] is not None else "-"
        share = f"{row['floor_share']:.0%}" if row["floor_share"] is not None else "-"
        cells = (
            f"{row['tokens_per_second']:.1f}",
            ratio,
            share,
            f"{row['ready_seconds']:.1f}",
            f"{row['busy_cores']:.2f}",
            f"{row['peak_rss'] / _GIB:.2f}",
            row["rounds"],
        )
        lines.append(f"{name:<16}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS)))
    return "\n".join([*lines, *(f"left out: {name}: {reason}" for name, reason in left_out.items())])


def breakdown_lines(breakdown: dict[str, float]) -> str:
    """Shares of a step, largest first."""
    total = sum(breakdown.values()) or 1.0
    parts = sorted(breakdown.items(), key=lambda item: -item[1])
    return "\n".join(f"  {seconds / total:5.1%}  {name}" for name, seconds in parts)


def store(path: Path, key: str, comparison: dict[str, Any]) -> dict[str, Any]:
    """Store one comparison in the record, replacing an earlier one under that key; returns the whole record."""
    record = json.loads(path.read_text()) if path.exists() else {}
    record[key] = comparison
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
    return record


def plot(record: dict[str, Any], path: Path) -> None:
    """Bars of tokens/s, one panel per comparison; in parentheses the ratio of Inflight to each engine."""
    from matplotlib.figure import Figure

    record = {key: comparison for key, comparison in record.items() if comparison["engines"]}
    if not record:
        return
    figure = Figure(figsize=(3.6 * len(record), 3.4), layout="constrained")
    max_engines = max(len(comparison["engines"]) for comparison in record.values())
    for index, (key, comparison) in enumerate(record.items()):
        axes = figure.add_subplot(1, len(record), index + 1)
        rows = sorted(comparison["engines"].items(), key=lambda item: item[1]["tokens_per_second"])
        rates = [row["tokens_per_second"] for _, row in rows]
        bars = axes.barh([name for name, _ in rows], rates, color=[_colour(name) for name, _ in rows])
        labels = [_label(name, row) for name, row in rows]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
        axes.set_xlim(0, max(rates) * 1.45)
        # Bars of the same height in all panels, from the top.
        axes.set_ylim(len(rows) - max_engines - 0.6, len(rows) - 0.4)
        axes.set_title(key, fontsize=10)
        axes.set_xlabel("output tokens/s (Inflight is ... times as fast)", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _label(name: str, row: dict[str, Any]) -> str:
    rate = f"{row['tokens_per_second']:.3g}" if row["tokens_per_second"] < 100 else f"{row['tokens_per_second']:.0f}"
    return rate if name == OURS or row["ratio"] is None else f"{rate}  ({row['ratio']:.2f} x)"


def _colour(name: str) -> str:
    return "#2a7f62" if name.startswith(OURS) else "#9aa5b1"
