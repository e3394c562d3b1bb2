"""Line and dot charts as inline SVG, coloured by the page's CSS variables so that they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["CSS", "Series", "chart", "ticks"]

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 44

CSS = """
figure { margin: 0; padding: 14px 16px 8px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
figcaption { font-weight: 600; margin-bottom: 2px; }
figure .legend { font-size: 13px; color: var(--soft); margin-bottom: 4px; display: flex; gap: 16px; flex-wrap: wrap; }
figure .legend i { display: inline-block; width: 18px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--soft); stroke-width: 1; }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg circle { fill-opacity: .55; }
svg .mark { stroke-dasharray: 4 4; stroke-width: 1.5; }
"""


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


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


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
    axes = _Axes(drawn, log_x, y_max, [x for x, _, _ in marks])
    parts = [*_grid(axes, percent), *_labels(x_label, y_label)]
    if diagonal:
        end = min(axes.x_high, axes.y_high)
        parts.append(
            _line([(axes.x_low, axes.x_low), (end, end)], axes, "soft", "stroke-dasharray='2 5' stroke-width='1.2'")
        )
    for x, label, colour in marks:
        at = axes.x(x)
        anchor, shift = ("end", -5) if at > _WIDTH * 0.7 else ("start", 5)
        parts.append(
            f"<line class='mark' x1='{at:.1f}' x2='{at:.1f}' y1='{_TOP}' y2='{_HEIGHT - _BOTTOM}' "
            f"stroke='var(--{colour})'/>"
            f"<text x='{at + shift:.1f}' y='{_TOP + 11}' text-anchor='{anchor}'>{escape(label)}</text>"
        )
    for some in drawn:
        if some.style in ("line", "both"):
            parts.append(_line(some.points, axes, some.colour))
        if some.style in ("dots", "both"):
            parts += _dots(some, axes)
    legend = "".join(
        f"<span><i style='background:var(--{some.colour})'></i>{escape(some.name)}</span>" for some in drawn
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption><div class='legend'>{legend}</div>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{escape(title)}'>{''.join(parts)}</svg></figure>"
    )


class _Axes:
    """Maps data to pixels."""

    def __init__(self, series: Sequence[Series], log_x: bool, y_max: float | None, marks: Sequence[float]) -> None:
        xs = [x for some in series for x, _ in some.points] + list(marks)
        ys = [y for some in series for _, y in some.points]
        self.log = log_x
        if log_x:
            positive = [x for x in xs if x > 0] or [1.0]
            # A few tiny values must not squeeze the rest of the picture.
            self.x_low = max(min(positive), max(positive) / 1e5)
            self.x_high = max(max(positive), self.x_low * 1.01)
        else:
            self.x_low, self.x_high = 0.0, max(*xs, 1e-9) if len(xs) > 1 else max(xs[0], 1e-9)
        self.y_high = y_max or max(max(ys) * 1.06, 1e-9)

    def x(self, value: float) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        if self.log:
            value = min(max(value, self.x_low), self.x_high)
            return _LEFT + width * math.log(value / self.x_low) / math.log(self.x_high / self.x_low)
        return _LEFT + width * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(value, self.y_high) / self.y_high

    def x_ticks(self) -> list[float]:
        if not self.log:
            return ticks(self.x_low, self.x_high, 6)
        powers = range(math.floor(math.log10(self.x_low)), math.ceil(math.log10(self.x_high)) + 1)
        factors = (1, 2, 5) if self.x_high / self.x_low < 300 else (1,)
        return [f * 10.0**p for p in powers for f in factors if self.x_low <= f * 10.0**p <= self.x_high]


def _grid(axes: _Axes, percent: bool) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = []
    for value in ticks(0, axes.y_high):
        y = axes.y(value)
        text = f"{value * 100:.0f}%" if percent else _number(value)
        parts.append(f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text x='{_LEFT - 7}' y='{y + 4:.1f}' text-anchor='end'>{text}</text>")
    for value in axes.x_ticks():
        x = axes.x(value)
        parts.append(f"<line class='grid' x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP}' y2='{bottom}'/>")
        parts.append(f"<text x='{x:.1f}' y='{bottom + 17}' text-anchor='middle'>{_number(value)}</text>")
    parts.append(f"<line class='axis' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{bottom}' y2='{bottom}'/>")
    return parts


def _labels(x_label: str, y_label: str) -> list[str]:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    return [
        f"<text x='{(_LEFT + _WIDTH - _RIGHT) / 2}' y='{_HEIGHT - 7}' text-anchor='middle'>{escape(x_label)}</text>",
        f"<text transform='translate(13 {middle}) rotate(-90)' text-anchor='middle'>{escape(y_label)}</text>",
    ]


def _line(points: Sequence[tuple[float, float]], axes: _Axes, colour: str, extra: str = "") -> str:
    text = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in points)
    return f"<polyline points='{text}' stroke='var(--{colour})' {extra}/>"


def _dots(series: Series, axes: _Axes) -> list[str]:
    return [
        f"<circle cx='{axes.x(x):.1f}' cy='{axes.y(y):.1f}' r='3.2' fill='var(--{series.colour})'>"
        f"<title>{escape(series.name)}: {_number(x)}, {_number(y)}</title></circle>"
        for x, y in series.points
    ]


def _number(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
