"""Renders `report.html` from `report.json`: one file without scripts or external resources, ratios first."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from loadtest.charts import CSS, Series, chart

__all__ = ["render"]

_PAGE_CSS = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b1f24; --soft: #5d6673; --line: #e2e5ea;
  --inflight: #0a7d5a; --baseline: #c2571a; --good: #0a7d5a; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --text: #e7eaee; --soft: #9aa4b1;
  --line: #30363e; --inflight: #3ecf9b; --baseline: #f0904f; --good: #3ecf9b; --bad: #ff8a80; } }
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
.first td { padding: 10px 12px; } .first .ratio { font-size: 20px; font-weight: 700; }
.inflight { color: var(--inflight); font-weight: 600; } .baseline { color: var(--baseline); font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 16px; }
.three { grid-template-columns: repeat(auto-fit, minmax(min(350px, 100%), 1fr)); }
"""
_METRICS = (("ttft", "time to first text"), ("itl", "inter-token latency"), ("latency", "latency"))


_NAMES = {"inflight": "Inflight", "baseline": "Baseline"}


def render(data: dict[str, Any]) -> str:
    """The page of a report; `data` is the content of `report.json`."""
    scenario = data["scenario"]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Inflight load test: {escape(scenario['name'])}</title><style>{_PAGE_CSS}{CSS}</style></head><body>",
        f"<h1>Load test: {escape(scenario['name'])}</h1>",
        f"<p>{escape(scenario['about'])}. One server, one checkpoint ({escape(data['checkpoint'])}), the same requests "
        "to <span class='inflight'>Inflight</span> and the <span class='baseline'>baseline</span>: Triton's dynamic "
        "batcher (preferred batch size 8, 100&nbsp;ms queue delay) in front of a padded <code>generate()</code>.</p>",
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


def _ratios(data: dict[str, Any]) -> str:
    rows = []
    for ratio in data["ratios"]:
        claim = ""
        if ratio.get("target"):
            held = ratio["ratio"] is not None and ratio["ratio"] >= ratio["target"]
            claim = (
                f"<span class='{'good' if held else 'bad'}'>{'✓' if held else '✗'} at least {ratio['target']:g}×</span>"
            )
        text = "" if ratio["ratio"] is None else f"{ratio['ratio']:.2f}×"
        rows.append(
            f"<tr><td>{escape(ratio['what'])}</td><td class='inflight'>{_value(ratio['inflight'], ratio['unit'])}</td>"
            f"<td class='baseline'>{_value(ratio['baseline'], ratio['unit'])}</td><td class='ratio'>{text}</td>"
            f"<td>{claim}</td></tr>"
        )
    return (
        "<div class='scroll'><table class='first'><thead><tr><th></th><th>Inflight</th><th>baseline</th>"
        f"<th>Inflight is better by</th><th>claim</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


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
    kinds = list(data["models"]["inflight"]["classes"])
    wanted = ["all", *kinds] if len(kinds) > 1 else ["all"]
    rows = []
    for kind in wanted:
        for model in ("inflight", "baseline"):
            summary = data["models"][model]
            table = summary["all"] if kind == "all" else summary["classes"].get(kind)
            if not table:
                continue
            cells = "".join(f"<td>{cell}</td>" for metric, _ in _METRICS for cell in _percentile_cells(table[metric]))
            count = table["latency"]["count"] if table["latency"] else 0
            name = escape(kind) if model == "inflight" else ""
            rows.append(f"<tr><td>{name}</td><td class='{model}'>{model}</td><td>{count}</td>{cells}</tr>")
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
    return (
        "<p class='soft'>A locked batch cannot stream: the baseline's first text is its complete answer, so it has no "
        "inter-token latency. Inter-token latency is the gap between two responses with text, as seen by the client. "
        f"Goodput counts requests with the first text within {slo['ttft']:g} s and at most "
        f"{slo['tpot'] * 1e3:g} ms per further token on average.</p>"
    )


def _pair(data: dict[str, Any], pick: Any, style: str = "line") -> list[Series]:
    return [Series(name, pick(data, model), model, style) for model, name in _NAMES.items()]


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
    kv = [Series("Inflight", data["timeline"]["inflight"]["kv"], "inflight")]
    yield chart("KV blocks in use", kv, "seconds", "share of the pool", percent=True)
    yield chart("GPU busy", _pair(data, of("gpu")), "seconds", "share", y_max=1.0, percent=True)


def _sweep(data: dict[str, Any]) -> str:
    sweep = data.get("sweep")
    if not sweep:
        return ""

    def of(key: str) -> Any:
        return lambda d, model: [(point["offered"], point[key]) for point in d["sweep"][model]]

    knees = [(at, f"knee {at:.0f}", model) for model, at in data["knee"].items() if at is not None]
    text = "; ".join(
        f"{_NAMES[model]} kept up with the offered load "
        + (f"to about {at:.0f} tokens/s" if at is not None else "throughout the sweep")
        for model, at in data["knee"].items()
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
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    rounds = "".join(
        f"<tr><td>{row['round']}</td><td class='{row['model']}'>{row['model']}</td><td>{row['requests']}</td>"
        f"<td>{row['lost']}</td><td>{row['tokens']:,}</td><td>{row['seconds']:.1f} s</td>"
        f"<td>{row['tokens_per_second']:.0f}</td><td>{_value(row['client_cores'], '')}</td></tr>"
        for row in data["runs"]
    )
    return (
        f"<pre>{escape(data['command'])}</pre><p class='soft'>{escape(versions)}. Model options: "
        f"<code>{escape(data['options'])}</code>. {escape(data['threads'])}</p>"
        f"<p class='soft'>{escape(data['throughput_means'])}</p>"
        "<div class='scroll'><table><thead><tr><th>round</th><th></th><th>requests</th><th>lost</th><th>tokens</th>"
        "<th>time to last token</th><th>tokens/s</th><th>cores used by the load generator</th></tr></thead>"
        f"<tbody>{rounds}</tbody></table></div>"
    )
