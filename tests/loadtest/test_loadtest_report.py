"""Numbers and page of a run whose records are known."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from load_records import row
from typer.testing import CliRunner

from inflight_tools.workload.slo import SLO
from loadtest.__main__ import app
from loadtest.analysis import Phase, cdf, is_good, knee, percentiles, read_phase
from loadtest.charts import Series, chart
from loadtest.monitor import gauges


class _Page(HTMLParser):
    """The tags in order, and what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]


@pytest.fixture(scope="module")
def written(canned: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page that the command writes beside the numbers; it takes seconds to draw."""
    path = tmp_path_factory.mktemp("run") / "report.json"
    path.write_text(json.dumps(canned), encoding="utf-8")
    assert CliRunner().invoke(app, ["render", str(path)]).exit_code == 0
    return path.with_name("report.html").read_text(encoding="utf-8")


def test_page_is_self_contained(written: str) -> None:
    text = written
    page = _Page(text)
    assert all(name.startswith("#") for name in page.fetched)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert "A note &lt;b&gt;from&lt;/b&gt;" in text, "text from elsewhere is escaped"


def test_numbers_of_the_canned_run(canned: dict[str, Any]) -> None:
    ours, theirs = canned["models"]["inflight"], canned["models"]["baseline"]
    assert ours["all"]["ttft"] == {"count": 40, "p50": 0.2, "p95": 0.2, "p99": 0.2}
    assert ours["all"]["itl"]["p50"] == pytest.approx(0.1)
    assert theirs["all"]["itl"] is None and theirs["all"]["ttft"]["p50"] == 4.0
    assert set(ours["classes"]) == {"long", "short"}
    assert ours["classes"]["long"]["latency"]["count"] == 8
    assert (ours["attainment"], theirs["attainment"]) == (1.0, 0.0)
    assert ours["lost"] == theirs["lost"] == 0
    ratios = {ratio["key"]: ratio for ratio in canned["ratios"]}
    assert ratios["ttft_p95"]["ratio"] == pytest.approx(20.0)
    assert ratios["tokens_per_second"]["target"] == 3.1
    # The last request is sent at 9.5 s: tokens that arrived by then, over the arrival of the last one.
    assert theirs["tokens_per_second"] == pytest.approx(12 * 10 / 9.5)
    assert canned["timeline"]["inflight"]["kv"][0][1] == pytest.approx(0.3)
    assert json.loads(json.dumps(canned))["rounds"] == 2


def test_saturated_throughput_of_a_locked_batch_ends_at_its_last_batch() -> None:
    rows = [row(k, 0.0, [(10.0, 50)]) for k in range(8)] + [row(k, 10.0, [(9.0, 50)]) for k in range(8, 16)]
    rows.append(row(16, 12.0, [(30.0, 50)]))  # sent last; the second batch ends at 19 s
    assert Phase("baseline", rows).saturated_tokens_per_second == pytest.approx(8 * 50 / 10.0)


def test_lost_requests_are_counted_and_do_not_meet_the_slo() -> None:
    phase = Phase("inflight", [row(0, 0.0, [(0.1, 1), (0.2, 1)]), row(1, 0.0, [])], expected=4)
    assert phase.lost == 3
    assert phase.attainment(SLO()) == 0.25


def test_slo_holds_for_first_text_and_for_the_rest() -> None:
    for arrivals, met in [
        ([(0.5, 1), (0.6, 1)], True),
        ([(1.5, 1), (1.6, 1)], False),
        ([(0.5, 1), (0.9, 1)], False),
        ([(0.5, 9)], True),
    ]:
        assert is_good(row(0, 0.0, arrivals), SLO(ttft=1.0, tpot=0.2)) is met


def test_knee_is_where_the_lines_cross() -> None:
    points = [{"offered": x, "delivered": min(0.9 * x, 90.0)} for x in (20.0, 60.0, 120.0, 200.0)]
    assert knee(points) == pytest.approx(100.0)
    assert knee([{"offered": x, "delivered": 0.9 * x} for x in (20.0, 60.0, 120.0)]) is None
    assert knee(points[:2]) is None


def test_percentiles_and_cdf() -> None:
    values = [float(value) for value in range(1, 102)]
    assert percentiles(values) == {"count": 101, "p50": 51.0, "p95": 96.0, "p99": 100.0}
    assert percentiles([]) is None and cdf([]) == []
    points = cdf(values)
    assert points[0] == (1.0, 0.0) and points[-1] == (101.0, 1.0)
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(points))


def test_an_incomplete_record_loses_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    lines = [json.dumps({"begun": 5.0}), json.dumps(row(0, 0.0, [(0.1, 1)])), '{"index": 1, "ki']
    path.write_text("\n".join(lines), encoding="utf-8")
    phase = read_phase(path, "inflight", expected=2)
    assert (phase.begun, len(phase.rows), phase.lost) == (5.0, 1, 1)


def test_gauges_are_read_for_the_model_under_load() -> None:
    text = (
        "# TYPE inflight_requests_waiting gauge\n"
        'inflight_requests_waiting{model="inflight",version="1"} 3\n'
        'inflight_requests_waiting{model="other",version="1"} 9\n'
        'nv_inference_pending_request_count{model="inflight",version="1"} 2\n'
        'nv_gpu_utilization{gpu_uuid="a"} 0.5\n'
        'nv_gpu_utilization{gpu_uuid="b"} 0.7\n'
    )
    assert gauges(text, "inflight") == {"waiting": 3.0, "pending": 2.0, "gpu": pytest.approx(0.6)}


def test_a_chart_shows_its_series_and_no_markup_of_theirs() -> None:
    points = [(0.0, 0.0), (1e-6, 1.0), (50.0, 9.0)]
    svg = chart("t", [Series("$a$", points, "first", "both"), Series("b", [], "second")], "x", "y", log_x=True)
    assert "$a$</text>" in svg and "stroke: var(--first)" in svg and "--second" not in svg and "<style" not in svg
    assert chart("t", [Series("a", [], "first")], "x", "y") == ""
    assert "<script" not in chart("<script>", [Series("<script>", [(1.0, 1.0)], "first")], "<script>", "y")


def test_render_writes_the_page_again(written: str, tmp_path: Path) -> None:
    assert "Inflight is better by" in written
    missing = CliRunner().invoke(app, ["render", str(tmp_path / "none.json")])
    assert missing.exit_code == 2
