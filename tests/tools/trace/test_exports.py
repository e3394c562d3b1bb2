"""Perfetto's JSON, the HTML page and the command that writes them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise

import pytest
from drafters import HashDrafter
from engine_rig import Info, add, make_core, run_until_idle
from typer.testing import CliRunner

from inflight.engine.step_trace import Trace
from inflight_tools.cli import app
from inflight_tools.trace.files import format_of, render
from inflight_tools.trace.html import timeline_html
from inflight_tools.trace.perfetto import perfetto_trace
from inflight_tools.trace.timeline import build_timeline


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Thirty requests on a pool that is too small for them, one of them aborted, one still running."""
    core = make_core(Info(num_blocks=20), step_trace=True, block_size=4, max_num_seqs=8, max_num_batched_tokens=16)
    for request_id in range(30):
        add(core, request_id, [1 + request_id] * (1 + request_id % 13), max_tokens=2 + request_id % 17, ignore_eos=True)
        core.step()
        core.trace.sent(1e-5)
    core.abort(29)
    run_until_idle(core, {}, {})
    add(core, 99, [1, 2], max_tokens=20, ignore_eos=True, n=2)
    core.step()
    core.step()
    return core.trace.snapshot()


def test_every_perfetto_event_has_what_its_phase_needs(trace):
    document = json.loads(json.dumps(perfetto_trace(build_timeline(trace))))
    assert document["displayTimeUnit"] == "ms"
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X", "C", "i")
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int) for value in event["args"].values())


def test_no_slices_of_a_track_overlap_and_every_track_has_a_name(trace):
    events = perfetto_trace(build_timeline(trace))["traceEvents"]
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(tracks) <= named
    for spans in tracks.values():
        spans.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))
    assert len(tracks) == 1 + len(build_timeline(trace).rows)


def test_perfetto_shows_each_kind_and_each_end(trace):
    events = perfetto_trace(build_timeline(trace))["traceEvents"]
    assert {e.get("cat") for e in events if e["ph"] == "X" and e["pid"] == 2} == {
        "waiting", "prefill", "decode", "preempted",
    }  # fmt: skip
    ends = [event["name"] for event in events if event["ph"] == "i"]
    assert ends.count("end: abort") == 1
    assert ends.count("end: length") == 29
    phases = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert phases == ["schedule", "forward", "sample", "update", "send"] * len(trace.steps)


def page_data(page: str) -> dict:
    match = re.search(r"^const D = (.*);$", page, re.MULTILINE)
    assert match
    return json.loads(match[1])


def test_the_page_is_complete_and_self_contained(trace):
    timeline = build_timeline(trace)
    page = timeline_html(timeline, "a model")
    assert not re.search(r"https?://|src=|@import|url\(", page)
    data = page_data(page)
    assert data["model"] == "a model"
    assert len(data["rows"]) == len(timeline.rows)
    assert len(data["steps"]) == len(trace.steps)
    for shown, row in zip(data["rows"], timeline.rows):
        steps = [range(s[1], (s[2] if s[0] == 2 else s[1]) + 1) for s in shown["slices"] if s[0] in (1, 2)]
        assert [i for some in steps for i in some] == [s.step for s in row.slices if s.step is not None]
    static = data["static"]
    assert static["requests"] == 29, "neither the aborted one nor those still running"
    assert sorted(len(b[4]) for b in static["batches"])[-1] <= 8
    assert 0 < static["idle"] < 1


def test_drafts_are_in_both_exports():
    core = make_core(Info(), step_trace=True)
    core.scheduler.policies.drafter = drafter = HashDrafter("half", 3)
    add(core, 1, [1, 2, 3], max_tokens=12, ignore_eos=True)
    run_until_idle(core, {}, {})
    timeline = build_timeline(core.trace.snapshot())
    events = perfetto_trace(timeline)["traceEvents"]
    told = [e for e in events if e["ph"] == "X" and "drafts" in e.get("args", {})]
    assert sum(e["args"]["drafts"] for e in told) == drafter.num_drafts
    names = {
        f"{kind}, {a} of {d} drafts" for kind in ("decode", "prefill 6") for d in range(1, 4) for a in range(d + 1)
    }
    assert {e["name"] for e in told} <= names
    counted = [e["args"]["refused drafts"] for e in events if e["ph"] == "C" and e["name"] == "tokens"]
    assert sum(counted) == drafter.num_drafts - drafter.num_accepted
    data = page_data(timeline_html(timeline))
    drafted = [s for s in data["rows"][0]["slices"] if len(s) > 4]
    assert sum(s[4] for s in drafted) == drafter.num_drafts
    assert sum(s[5] for s in drafted) == drafter.num_accepted
    assert sum(s[-1] for s in data["steps"]) == sum(timeline.refused_tokens) > 0


def test_a_name_cannot_end_the_script(trace):
    page = timeline_html(build_timeline(trace), "</script><b>")
    assert page.count("</script>") == 1
    assert page_data(page)["model"] == "</script><b>"


def test_the_file_name_implies_the_format(tmp_path):
    assert format_of(tmp_path / "a.html") == "html"
    assert format_of(tmp_path / "a.json") == "json"
    for name in ("a.perfetto.json", "a.trace.json", "a.pftrace"):
        assert format_of(tmp_path / name) == "perfetto"
    with pytest.raises(ValueError, match="--format"):
        format_of(tmp_path / "a.txt")


def run(*arguments: object):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_the_command_converts_a_saved_trace(trace, tmp_path):
    saved = tmp_path / "saved.json"
    saved.write_bytes(trace.to_json())
    page, perfetto, raw = tmp_path / "a.html", tmp_path / "a.perfetto.json", tmp_path / "b.txt"
    result = run("--input", saved, "-o", page, "-o", perfetto)
    assert result.exit_code == 0, result.output
    assert "<!doctype html>" in page.read_text()
    assert json.loads(perfetto.read_text())["traceEvents"]
    result = run("--input", saved, "-o", raw, "--format", "json", "--last", 3)
    assert result.exit_code == 0, result.output
    assert len(Trace.from_json(raw.read_bytes()).steps) == 3
    since = (trace.steps[19].end + trace.steps[20].end) / 2
    result = run("--input", saved, "-o", raw, "--format", "json", "--seconds", trace.steps[-1].end - since)
    assert result.exit_code == 0, result.output
    assert Trace.from_json(raw.read_bytes()).steps == trace.steps[20:]
    assert render(trace, "json") == saved.read_bytes()


def test_wrong_usage_is_one_line_and_status_2(tmp_path, monkeypatch):
    for arguments, says in [
        (["--input", "missing.json", "-o", "a.html"], "missing.json"),
        (["--input", "other.json", "-o", "a.html"], "not a step trace"),
        (["-o", "a.txt"], "--format"),
        (["-o", "a.html", "--format", "svg"], "must be one of html, perfetto, json"),
        (["-o", "a.html", "--url", "127.0.0.1:1"], "cannot reach 127.0.0.1:1 by HTTP"),
        (["-o", "a.html", "--url", "http://"], "url='http://': no host"),
    ]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "other.json").write_text('{"a": 1}')
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert says in result.output
        assert result.output.count("\n") == 1
        assert not (tmp_path / "a.html").exists()


def test_an_engine_that_has_run_nothing_has_no_timeline(tmp_path):
    core = make_core(Info(), step_trace=True)
    saved = tmp_path / "saved.json"
    saved.write_bytes(core.trace.snapshot().to_json())
    result = run("--input", saved, "-o", tmp_path / "a.html")
    assert result.exit_code == 1
    assert "send requests first" in result.output
