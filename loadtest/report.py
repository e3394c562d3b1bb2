"""Renders `report.html` from `report.json`: one file without scripts or external resources, ratios first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from loadtest.charts import CSS, Series, chart

__all__ = ["render"]

_PAGE_CSS = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b1f24; --soft: #5d6673; --line: #e2e5ea;
  --first: #0a7d5a; --second: #c2571a; --good: #0a7d5a; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --text: #e7eaee; --soft: #9aa4b1;
  --line: #30363e; --first: #3ecf9b; --second: #f0904f; --good: #3ecf9b; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 32px 24px 56px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 10px; }
p { margin: 6px 0; } .soft, caption, small { color: var(--soft); }
code, pre { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; overflow: hidden; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: right; border-top: 1px solid var(--line); white-space: nowrap; }
thead th { border-top: 0; color: var(--soft); font-weight: 600; font-size: 13px; }
th:first-child, td:first-child { text-align: left; }
.ratios td { padding: 10px 12px; } .ratios .ratio { font-size: 20px; font-weight: 700; }
.first { color: var(--first); font-weight: 600; } .second { color: var(--second); font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 16px; }
.three { grid-template-columns: repeat(auto-fit, minmax(min(350px, 100%), 1fr)); }
"""
_METRICS = (("ttft", "time to first text"), ("itl", "inter-token latency"), ("latency", "latency"))
_COLOURS = ("first", "second")  # of the sides: CSS variables, and classes


@dataclass(frozen=True)
class _Side:
    """One side of the comparison: its key in the data, its name, where it is, and its colour."""

    key: str
    name: str
    about: str
    colour: str


def _sides(data: dict[str, Any]) -> list[_Side]:
    """Reports from before 2026-11-24 compare Inflight with Triton's batcher, without saying so."""
    given = data.get("sides") or [{"key": key, "name": key.capitalize(), "about": ""} for key in data["models"]]
    return [_Side(side["key"], side["name"], side["about"], colour) for side, colour in zip(given, _COLOURS)]


def render(data: dict[str, Any]) -> str:
    """The page of a report; `data` is the content of `report.json`."""
    scenario = data["scenario"]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Inflight load test: {escape(scenario['name'])}</title><style>{_PAGE_CSS}{CSS}</style></head><body>",
        f"<h1>Load test: {escape(scenario['name'])}</h1>",
        f"<p>{escape(scenario['about'])}. {_subject(data)}</p>",
        f"<p class='soft'>{escape(data['machine'])} · {escape(data['date'])} · {escape(data['load'])} · "
        f"{data['rounds']} alternating rounds</p>",
        _ratios(data),
        *(f"<p>{escape(note)}</p>" for note in data["notes"]),
        "<h2>Latency by prompt class</h2>",
        _classes(data),
        _notes_on_latency(data),
        "<h2>Distributions</h2>",
        _charts(_distributions(data), "three"),
        "<h2>Over time</h2>",
        f"<p class='soft'>{escape(data['timeline_of'])}</p>",
        _charts(_timelines(data)),
        _sweep(data),
        "<h2>How to reproduce this run</h2>",
        _how(data),
        "</body></html>",
    ]
    return "".join(parts)


def _subject(data: dict[str, Any]) -> str:
    """The sentence that names the sides."""
    if data.get("against_batcher", True):
        return (
            f"One server, one checkpoint ({escape(data['checkpoint'])}), the same requests to <span class='first'>"
            "Inflight</span> and the <span class='second'>baseline</span>: Triton's dynamic batcher (preferred batch "
            "size 8, 100&nbsp;ms queue delay) in front of a padded <code>generate()</code>."
        )
    sides = _sides(data)
    named = [f"<span class='{side.colour}'>{escape(side.name)}</span>, {escape(side.about)}" for side in sides]
    return f"{'The same requests to' if len(sides) > 1 else 'Requests to'} {'; and to '.join(named)}."


def _ratios(data: dict[str, Any]) -> str:
    sides = _sides(data)
    rows = []
    for ratio in data["ratios"]:
        values = ratio.get("values", ratio)  # in reports from before 2026-11-24, beside the other keys
        cells = [f"<td class='{side.colour}'>{_value(values[side.key], ratio['unit'])}</td>" for side in sides]
        if len(sides) > 1:
            text = "" if ratio["ratio"] is None else f"{ratio['ratio']:.2f}×"
            cells.append(f"<td class='ratio'>{text}</td><td>{_claim(ratio)}</td>")
        rows.append(f"<tr><td>{escape(ratio['what'])}</td>{''.join(cells)}</tr>")
    top = [f"<th>{escape(side.name)}</th>" for side in sides]
    if len(sides) > 1:
        has_claims = any(ratio.get("target") for ratio in data["ratios"])
        top.append(f"<th>{escape(sides[0].name)} is better by</th><th>{'claim' if has_claims else ''}</th>")
    return (
        f"<div class='scroll'><table class='ratios'><thead><tr><th></th>{''.join(top)}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _claim(ratio: dict[str, Any]) -> str:
    if not ratio.get("target"):
        return ""
    held = ratio["ratio"] is not None and ratio["ratio"] >= ratio["target"]
    return f"<span class='{'good' if held else 'bad'}'>{'✓' if held else '✗'} at least {ratio['target']:g}×</span>"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "s":
        return _seconds(value)
    if unit == "share":
        return f"{value * 100:.0f}%"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f}&nbsp;ms" if value < 1 else f"{value:.2f}&nbsp;s"


def _classes(data: dict[str, Any]) -> str:
    sides = _sides(data)
    kinds = list(dict.fromkeys(kind for side in sides for kind in data["models"][side.key]["classes"]))
    wanted = ["all", *kinds] if len(kinds) > 1 else ["all"]
    rows = []
    for kind in wanted:
        for side in sides:
            summary = data["models"][side.key]
            table = summary["all"] if kind == "all" else summary["classes"].get(kind)
            if not table:
                continue
            cells = "".join(f"<td>{cell}</td>" for metric, _ in _METRICS for cell in _percentile_cells(table[metric]))
            count = table["latency"]["count"] if table["latency"] else 0
            name = escape(kind) if side is sides[0] else ""
            rows.append(
                f"<tr><td>{name}</td><td class='{side.colour}'>{escape(side.name)}</td><td>{count}</td>{cells}</tr>"
            )
    top = "".join(f"<th colspan='3' style='text-align:center'>{name}</th>" for _, name in _METRICS)
    return (
        f"<div class='scroll'><table><thead><tr><th></th><th></th><th></th>{top}</tr><tr><th>prompts</th><th></th>"
        f"<th>requests</th>{'<th>p50</th><th>p95</th><th>p99</th>' * 3}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _percentile_cells(values: dict[str, float] | None) -> list[str]:
    return [_seconds(values[key]) for key in ("p50", "p95", "p99")] if values else ["–"] * 3


def _notes_on_latency(data: dict[str, Any]) -> str:
    slo = data["slo"]
    locked = (
        "A locked batch cannot stream: the baseline's first text is its complete answer, so it has no inter-token "
        "latency. "
    )
    return (
        f"<p class='soft'>{locked if data.get('against_batcher', True) else ''}"
        "Inter-token latency is the gap between two responses with text, as seen by the client. "
        f"Goodput counts requests with the first text within {slo['ttft']:g} s and at most "
        f"{slo['tpot'] * 1e3:g} ms per further token on average.</p>"
    )


def _pair(data: dict[str, Any], pick: Any, style: str = "line") -> list[Series]:
    return [Series(side.name, pick(data, side.key), side.colour, style) for side in _sides(data)]


def _distributions(data: dict[str, Any]) -> Iterable[str]:
    for metric, name in _METRICS:
        series = _pair(data, lambda d, model, metric=metric: d["models"][model]["cdf"][metric])
        what = "gaps" if metric == "itl" else "requests"
        title, y_label = f"{name[0].upper()}{name[1:]}", f"cumulative share of {what}"
        yield chart(title, series, "seconds (log)", y_label, log_x=True, y_max=1.0, percent=True)


def _timelines(data: dict[str, Any]) -> Iterable[str]:
    def of(key: str) -> Any:
        return lambda d, model: d["timeline"][model][key]

    yield chart(
        "Latency of each request, by the time it was sent", _pair(data, of("latency"), "dots"), "seconds", "seconds"
    )
    yield chart("Requests still waiting for text", _pair(data, of("textless")), "seconds", "requests")
    yield chart("Tokens delivered per second", _pair(data, of("tokens")), "seconds", "tokens/s")
    yield chart("Queue depth, from the server's metrics", _pair(data, of("queue")), "seconds", "requests")
    yield chart(
        "CPU cores busy in the server", _pair(data, of("server_cores")), "seconds", "share", y_max=1.0, percent=True
    )
    yield chart("KV blocks in use", _pair(data, of("kv")), "seconds", "share of the pool", percent=True)
    yield chart("GPU busy", _pair(data, of("gpu")), "seconds", "share", y_max=1.0, percent=True)


def _sweep(data: dict[str, Any]) -> str:
    sweep = data.get("sweep")
    if not sweep:
        return ""

    def of(key: str) -> Any:
        return lambda d, model: [(point["offered"], point[key]) for point in d["sweep"][model]]

    found = [(side, data["knee"][side.key]) for side in _sides(data)]
    knees = [(at, f"knee {at:.0f}", side.colour) for side, at in found if at is not None]
    text = "; ".join(
        f"{side.name} kept up with the offered load "
        + (f"to about {at:.0f} tokens/s" if at is not None else "throughout the sweep")
        for side, at in found
    )
    figures = [
        chart(
            "Delivered and offered load", _pair(data, of("delivered"), "both"), "offered, output tokens/s",
            "delivered, tokens/s", marks=knees, diagonal=True,
        ),
        chart("p95 time to first text", _pair(data, of("ttft_p95"), "both"), "offered, output tokens/s", "seconds"),
        chart(
            "Requests within the SLO", _pair(data, of("attainment"), "both"), "offered, output tokens/s", "share",
            y_max=1.0, percent=True,
        ),
    ]  # fmt: skip
    return (
        f"<h2>Throughput by offered load</h2><p>{escape(text)}.</p>"
        f"<p class='soft'>Open loop, {escape(data['sweep_process'])} arrivals. The delivered load is all tokens over "
        "the time from the start to the last token; below the knee it is slightly lower than the offered load, since "
        "the last requests still run when no more arrive. The knee is where the line through the lowest point reaches "
        "the highest delivered load.</p>"
    ) + _charts(figures, "three")


def _charts(figures: Iterable[str], columns: str = "two") -> str:
    return f"<div class='charts {columns}'>{''.join(figures)}</div>"


def _how(data: dict[str, Any]) -> str:
    sides = {side.key: side for side in _sides(data)}
    options = f"Model options: <code>{escape(data['options'])}</code>. " if data["options"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    rounds = "".join(
        f"<tr><td>{row['round']}</td><td class='{sides[row['model']].colour}'>{escape(sides[row['model']].name)}</td>"
        f"<td>{row['requests']}</td><td>{row['lost']}</td><td>{row['tokens']:,}</td><td>{row['seconds']:.1f} s</td>"
        f"<td>{row['tokens_per_second']:.0f}</td><td>{_value(row['client_cores'], '')}</td></tr>"
        for row in data["runs"]
    )
    return (
        f"<pre>{escape(data['command'])}</pre><p class='soft'>{escape(versions)}. {options}"
        f"{escape(data['threads'])}</p>"
        f"<p class='soft'>{escape(data['throughput_means'])}</p>"
        "<div class='scroll'><table><thead><tr><th>round</th><th></th><th>requests</th><th>lost</th><th>tokens</th>"
        "<th>time to last token</th><th>tokens/s</th><th>cores used by the load generator</th></tr></thead>"
        f"<tbody>{rounds}</tbody></table></div>"
    )
