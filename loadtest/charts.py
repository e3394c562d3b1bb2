"""Line and dot charts as inline SVG, drawn by matplotlib in the page's CSS variables so that they follow its theme."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

__all__ = ["CSS", "Series", "chart"]

CSS = """
figure { margin: 0; padding: 14px 16px 8px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
figcaption { font-weight: 600; margin-bottom: 2px; }
svg { width: 100%; height: auto; display: block; }
"""
# By CSS variable, the colour that matplotlib is told and that becomes `var(--NAME)` in its output.
_COLOURS = {"first": "#010101", "second": "#020202", "soft": "#030303", "line": "#040404"}
_STYLES = {"line": "-", "dots": "o", "both": "o-"}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "loadtest",
    "font.size": 9,
    "text.color": _COLOURS["soft"],
    "text.parse_math": False,
    "axes.facecolor": "none",
    "axes.edgecolor": _COLOURS["soft"],
    "axes.labelcolor": _COLOURS["soft"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": _COLOURS["line"],
    "grid.linewidth": 0.8,
    "xtick.color": _COLOURS["soft"],
    "ytick.color": _COLOURS["soft"],
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Series:
    """Points in one colour.

    Attributes:
        colour: name of a CSS variable, without the dashes.
        style: "line", "dots" or "both".
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    style: str = "line"


def chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    y_max: float | None = None,
    percent: bool = False,
    marks: Sequence[tuple[float, str, str]] = (),
    diagonal: bool = False,
) -> str:
    """A `<figure>`; an empty string if no series has a point.

    Args:
        log_x: logarithmic x axis; points at or below 0 are drawn at the left edge.
        y_max: top of the y axis; None fits the data.
        percent: y values are shares, shown as percentages.
        marks: vertical dashed lines (x, label, colour).
        diagonal: draw y = x.
    """
    drawn = [some for some in series if some.points]
    if not drawn:
        return ""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    positive = [x for some in drawn for x, _ in some.points if x > 0] or [1.0]
    low = max(min(positive), max(positive) / 1e5)  # a few tiny values must not squeeze the rest of the picture
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        axes = figure.subplots()
        for some in drawn:
            xs = [max(x, low) if log_x else x for x, _ in some.points]
            ys, colour = [y for _, y in some.points], _COLOURS[some.colour]
            alpha = 0.6 if some.style == "dots" else 1.0
            axes.plot(xs, ys, _STYLES[some.style], color=colour, label=some.name, alpha=alpha)
        highest = axes.get_ylim()[1]
        if diagonal:
            axes.axline((0, 0), slope=1, color=_COLOURS["soft"], linestyle=":", linewidth=1)
        for x, label, colour in marks:
            axes.axvline(x, color=_COLOURS[colour], linestyle="--", linewidth=1.2)
            place: dict[str, Any] = dict(
                xytext=(4, -10), xycoords=("data", "axes fraction"), textcoords="offset points"
            )
            axes.annotate(label, (x, 1), **place)
        if log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(left=low if log_x else 0)
        axes.set_ylim(0, y_max or highest)
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        figure.legend(loc="outside upper left", ncols=len(drawn))
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True)
    return f"<figure><figcaption>{escape(title)}</figcaption>{_inline(text.getvalue(), title)}</figure>"


def _inline(svg: str, title: str) -> str:
    """An SVG file as part of a page: without prologue, metadata and style, in the page's font and colours."""
    start = rf"<svg \1 role='img' aria-label='{escape(title)}'>"
    svg = re.sub(r"""^.*?<svg[^>]*(viewBox="[^"]*")[^>]*>""", start, svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"<(metadata|style).*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)
    for name, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg
