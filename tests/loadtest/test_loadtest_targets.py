"""Reports of one or two endpoints of any kind."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from load_records import row
from openai_server import serving_openai
from typer.testing import CliRunner

from inflight_tools.workload.slo import SLO
from loadtest import report
from loadtest.__main__ import _without_keys, app
from loadtest.analysis import Phase
from loadtest.charts import Series
from loadtest.errors import LoadTestError
from loadtest.options import LoadOptions
from loadtest.report import render
from loadtest.results import build
from loadtest.runner import Plan, Results, run
from loadtest.targets import Target, find_targets

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def charts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[Series]]]:
    """The charts of the page that was rendered last; they are not drawn."""
    drawn: list[tuple[str, list[Series]]] = []

    def chart(title: str, series: list[Series], *_: Any, **__: Any) -> str:
        drawn.append((title, series))
        return ""

    monkeypatch.setattr(report, "chart", chart)
    return drawn


def _report(*targets: Target, options: LoadOptions | None = None, **changes: Any) -> dict[str, Any]:
    plan = Plan(options or LoadOptions(), targets, False, rounds=1, sweep=(1.0,), slo=SLO(1.0, 0.15))
    results = Results(plan, plan.load.load(), targets)
    for target in targets:
        rows = [row(index, 0.5 * index, [(0.2 + 0.1 * at, 1) for at in range(10)]) for index in range(10)]
        if target is targets[-1]:
            rows[0] |= changes
        results.rounds[target.key] = [Phase(target.key, rows, expected=10)]
        results.sweep[target.key] = [Phase(target.key, [{**one, "due": one["start"]} for one in rows])]
    return build(results, "python -m loadtest run", [])


def _target(name: str, **fields: Any) -> Target:
    return Target(name, name, "openai", f"http://{name}:9000", "llama", **fields)


def test_two_endpoints_have_their_names_everywhere(charts: list[tuple[str, list[Series]]]) -> None:
    data = _report(_target("<new>"), _target("vLLM"))
    page = render(json.loads(json.dumps(data)))
    assert "<th>&lt;new&gt;</th><th>vLLM</th><th>&lt;new&gt; is better by</th>" in page
    assert "model llama at http://vLLM:9000 (OpenAI&#x27;s API)" in page
    assert "&lt;new&gt; meets the SLO: 100% of its requests are within it, and 90% must be." in page
    assert not re.search("[Bb]aseline|[Bb]atcher|class='claim'|locked", page)
    named = {title: [series.name for series in drawn] for title, drawn in charts}
    assert set(map(tuple, named.values())) == {("<new>", "vLLM")}
    assert "vLLM kept up with the offered load" in page and len(data["runs"]) == 2


def test_one_endpoint_is_compared_with_nothing() -> None:
    page = render(_report(_target("vLLM")))
    assert "Requests to <span class='first'>vLLM</span>" in page and "better by" not in page


def test_a_report_says_how_tokens_were_counted_and_which_answers_were_short() -> None:
    plain = _target("plain", traits={"path": "/chat/completions", "ids": False, "without": ["ignore_eos"]})
    said = " ".join(
        _report(plain, options=LoadOptions(prompt="words"), counted="chunks", ended_early=True, output_tokens=99)[
            "notes"
        ]
    )
    assert "Number of tokens of plain: the server does not say it, so each response with text counts as one" in said
    assert "plain has no ignore_eos" in said and "plain ended 1 of 10 answers before the requested length" in said
    assert "Prompts are English words" in said
    assert "has no ignore_eos" not in " ".join(_report(_target("full"))["notes"])


def test_failures_are_counted_by_name() -> None:
    target = _target("vLLM")
    plan = Plan(LoadOptions(), (target,), False, rounds=1)
    results = Results(plan, plan.load.load(), (target,))
    rows = [row(index, 0.1 * index, []) for index in range(4)]
    rows[0] |= {"failure": "HTTP 429", "error": "HTTP 429: slow down"}
    results.rounds["vLLM"], results.sweep["vLLM"] = [Phase("vLLM", rows, expected=5)], []
    data = build(results, "", [])
    assert data["models"]["vLLM"]["errors"] == [
        "3 × connection refused: 127.0.0.1:8001", "1 × HTTP 429: slow down", "1 × never ended"
    ]  # fmt: skip
    assert "vLLM misses the SLO: 0%" in render(data)


def test_a_run_without_any_answer_has_a_report() -> None:
    target = _target("vLLM")
    plan = Plan(LoadOptions(), (target,), False, rounds=1)
    results = Results(plan, plan.load.load(), (target,), {"vLLM": [Phase("vLLM", [], expected=3)]}, {"vLLM": []})
    assert "3 × never ended" in render(build(results, "", []))


@pytest.mark.parametrize("name", ["lognormal", "month-end"])
def test_recorded_reports_render_as_before(name: str, charts: list[tuple[str, list[Series]]]) -> None:
    data = json.loads((ROOT / f"loadtest/results/{name}/report.json").read_text(encoding="utf-8"))
    page = render(data)
    assert "<th>Inflight</th><th>Baseline</th><th>Inflight is better by</th><th>claim</th>" in page
    assert "Triton's dynamic batcher" in page and "at least" in page
    recorded = (ROOT / f"loadtest/results/{name}/report.html").read_text(encoding="utf-8")
    numbers = re.compile(r"<td class='ratio'>([^<]*)</td>")
    assert numbers.findall(page) == numbers.findall(recorded)
    assert {series.name for _, drawn in charts for series in drawn} == {"Inflight", "Baseline"}


def test_endpoints_are_found_with_their_only_model_and_told_apart() -> None:
    with serving_openai(models=("llama",)) as first, serving_openai(models=("llama",)) as second:
        one, two = find_targets([first.url, second.url], [], [], [], [], [])
        assert (one.model, one.kind, one.name, two.name) == ("llama", "openai", first.url, second.url)
        assert one.metrics == f"{first.url}/metrics"
        again = find_targets([first.url, first.url], [], [], [], [], ["gpu:9100", "http://gpu/m"])
        assert len({target.key for target in again}) == 2
        assert [target.metrics for target in again] == ["http://gpu:9100/metrics", "http://gpu/m"]
        second.models = ("qwen", "llama")
        with pytest.raises(LoadTestError, match=r"has 2 models \(llama, qwen\); choose one with --model"):
            find_targets([second.url], [], [], [], [], [])
        named = find_targets([first.url, second.url], [], ["ours", "theirs"], ["", "qwen"], ["", "secret"], [])
        assert [(target.key, target.model, target.api_key) for target in named] == [
            ("ours", "llama", None), ("theirs", "qwen", "secret")
        ]  # fmt: skip
        assert "secret" not in repr(named)
        models = find_targets([first.url, second.url], [], [], ["", "qwen"], [], [])
        assert [target.name for target in models] == ["llama", "qwen"]
        for names, said in [(["a"], "--name is given 1 times, --url 2"), (["a", "a"], "a name of its own")]:
            with pytest.raises(LoadTestError, match=said):
                find_targets([first.url, second.url], [], names, ["", "qwen"], [], [])
    with pytest.raises(LoadTestError, match="at most two"):
        find_targets(["a", "b", "c"], [], [], [], [], [])


def test_wrong_input_is_one_line_and_status_2(tmp_path: Path) -> None:
    with serving_openai(chat_only=True) as server:
        for arguments, said in [
            (["--url", server.url, "--prompt", "ids"], "the server takes only text; use --prompt words"),
            (["--url", server.url, "--url", server.url, "--models", "a,b"], "give one --url"),
            (["--models", "a,b"], "give the address of their Triton with --url"),
            (["--kind", "openai"], "--kind is given 1 times, --url 0 times"),
        ]:
            done = CliRunner().invoke(app, ["run", *arguments, "--output", str(tmp_path / "out")])
            assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_api_keys_are_not_in_the_report() -> None:
    arguments = ["run", "--api-key", "k1", "--url", "u", "--api-key=k2"]
    assert _without_keys(arguments) == ["run", "--api-key", "...", "--url", "u", "--api-key=..."]


@pytest.mark.nightly
def test_two_openai_servers_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with everything, the other plain; one of their requests is refused, and a stream is cut."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with (
        serving_openai(key="k1") as ours,
        serving_openai(chat_only=True, refused=("ignore_eos",), usage="none", tokens=30) as theirs,
    ):
        targets = find_targets([ours.url, theirs.url], [], ["ours", "their best"], [], ["k1", ""], [])
        load = LoadOptions(scenario="uniform", requests=6)
        plan = Plan(load, targets, False, users=2, rounds=2, sweep=(1.0,), sweep_seconds=0.1, output=tmp_path)
        lines: list[str] = []

        def say(line: str) -> None:
            if not lines:
                theirs.statuses = [429, "cut"]
            lines.append(line)

        results = run(plan, say)
    data = build(results, "", [])
    render(data)
    ours_summary, theirs_summary = data["models"]["ours"], data["models"]["their best"]
    assert (ours_summary["requests"], ours_summary["lost"], ours_summary["counted"]) == (12, 0, ["server"])
    assert (theirs_summary["requests"], theirs_summary["lost"], theirs_summary["counted"]) == (12, 2, ["chunks"])
    assert sorted(error.partition(":")[0] for error in theirs_summary["errors"]) == [
        "1 × HTTP 429", "1 × the stream ended without [DONE]"
    ]  # fmt: skip
    assert theirs_summary["ended_early"] == 10
    assert [(row["round"], row["model"]) for row in data["runs"]] == [
        (1, "ours"), (1, "their best"), (2, "ours"), (2, "their best")
    ]  # fmt: skip
    assert len(data["sweep"]["ours"]) == len(data["sweep"]["their best"]) == 1
    assert isinstance(ours.bodies[-1]["prompt"], str), "both get the same prompts"
    assert any("Prompts are English words" in note for note in data["notes"])
    assert (tmp_path / "their-best-round1.jsonl").exists()


@pytest.mark.nightly
def test_an_endpoint_that_dies_is_in_the_report(tmp_path: Path) -> None:
    with serving_openai() as ours, contextlib.ExitStack() as life:
        theirs = life.enter_context(serving_openai())
        targets = find_targets([ours.url, theirs.url], [], ["ours", "theirs"], [], [], [])
        load = LoadOptions(scenario="uniform", requests=6)
        plan = Plan(load, targets, False, users=3, rounds=2, output=tmp_path)

        def say(line: str) -> None:
            if line.startswith("theirs"):  # after its first round
                life.close()

        data = build(run(plan, say), "", [])
    render(data)
    assert [(row["model"], row["lost"]) for row in data["runs"]] == [
        ("ours", 0), ("theirs", 0), ("ours", 0), ("theirs", 6)
    ]  # fmt: skip
    assert data["models"]["theirs"]["errors"] == [f"6 × connection refused: {theirs.url.removeprefix('http://')}"]
