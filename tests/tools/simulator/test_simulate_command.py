"""`inflight simulate`: what it prints and writes, what it rejects, and that its choice is right."""

from __future__ import annotations

import json
import sys

import msgspec
import pytest
from simulated import PROFILE, engine, job
from simulated import simulate as run
from typer.testing import CliRunner

from inflight.config import ConfigError
from inflight.model_json import read_model_json
from inflight_tools.cli import app
from inflight_tools.simulator.report import summarise
from inflight_tools.simulator.sweep import Trial, highest_rate, parse_sweep
from inflight_tools.workload.slo import SLO


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(PROFILE))
    return str(path)


def simulate(profile, *arguments):
    return CliRunner().invoke(app, ["simulate", "--profile", profile, *map(str, arguments)])


def test_a_scenario_is_run_and_reported(profile, tmp_path):
    result = simulate(profile, "--scenario", "uniform", "--requests", 20, "--report", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert "requests      20 in" in result.output
    assert "TTFT" in result.output
    (row,) = json.loads((tmp_path / "r.json").read_text())
    assert (row["tokens"], row["refused"]) == (20 * 64, 0)


def test_a_trace_is_replayed_at_its_times(profile, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * k, "input_length": 10, "output_length": 2} for k in range(5)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    result = simulate(profile, "--trace", trace, "--report", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "r.json").read_text())
    assert 4.0 < row["seconds"] < 4.1
    twice = simulate(profile, "--trace", trace, "--speed", 2, "--report", tmp_path / "r.json")
    assert twice.exit_code == 0
    assert 2.0 < json.loads((tmp_path / "r.json").read_text())[0]["seconds"] < 2.1


def test_a_sweep_writes_the_setting_with_the_highest_goodput(profile, tmp_path):
    output = tmp_path / "deep" / "model.json"
    result = simulate(
        profile, "--scenario", "uniform", "--requests", 60, "--sweep", "max_num_seqs=1..32,max_num_batched_tokens=512",
        "--slo-ttft", 60, "--slo-tpot", 60, "--report", tmp_path / "r.json", "--output", output, "--set", "seed=7",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "r.json").read_text())
    assert [row["setting"]["max_num_seqs"] for row in rows] == [1, 2, 4, 8, 16, 32]
    best = max(rows, key=lambda row: row["goodput"])["setting"]
    written = json.loads(output.read_text())
    assert {key: written[key] for key in best} == best == {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    assert written["seed"] == 7
    assert read_model_json(output).dtype == "float32"


def test_a_sweep_of_an_open_loop_finds_the_rate(profile, tmp_path):
    result = simulate(
        profile, "--scenario", "uniform", "--requests", 30, "--arrivals", "poisson", "--sweep", "max_num_seqs=2,16",
        "--report", tmp_path / "r.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    few, many = json.loads((tmp_path / "r.json").read_text())
    assert many["rate"] > 2 * few["rate"] > 0
    assert min(few["attainment"], many["attainment"]) >= 0.9


def test_an_slo_that_no_setting_meets_fails_and_writes_nothing(profile, tmp_path):
    result = simulate(
        profile, "--requests", 10, "--sweep", "max_num_seqs=4", "--slo-ttft", 0, "-o", tmp_path / "m.json"
    )
    assert result.exit_code == 1
    assert "no setting answers 90% of the requests within 0 s" in result.output
    assert not (tmp_path / "m.json").exists()


def test_what_cannot_be_simulated_is_one_line_and_status_2(profile):
    for arguments, message in [
        (["--scenario", "nothing"], "unknown scenario 'nothing'; choose one of lognormal"),
        (["--router", "random"], "router 'random': must be one of"),
        (["--set", "max_num_seqs"], "expected KEY=VALUE"),
        (["--set", "max_num_seq=3"], "unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"),
        (["--set", "num_gpu_blocks_override=4"], "the KV pool holds 64 tokens, but the load has requests of"),
        (["--arrivals", "trace"], "no trace given; give one with --trace"),
        (["--trace", "nowhere.csv"], "trace nowhere.csv: "),
        (["--sweep", "max_num_seq=3"], "'max_num_seq' is not a key of model.json"),
        (["--sweep", "max_num_seqs=0"], "max_num_seqs=0"),
        (["--output", "model.json"], "--output receives the best setting of a sweep"),
        (["--config", "nowhere.json"], "nowhere.json: no such file"),
    ]:
        result = simulate(profile, *arguments)
        assert result.exit_code == 2
        assert message in result.output
        assert result.output.count("\n") == 1


def test_drafts_that_are_accepted_by_chance_are_reported(profile, tmp_path):
    result = simulate(
        profile, "--requests", 10, "--users", 2, "--set", 'speculative_config={"method": "suffix"}',
        "--accepted-drafts", 0.8, "--report", tmp_path / "r.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "% of the tokens accepted" in result.output
    (row,) = json.loads((tmp_path / "r.json").read_text())
    assert row["draft_tokens"] > row["accepted_tokens"] > row["drafts"] > 0


def test_a_seed_below_zero_is_wrong_usage(profile):
    result = simulate(profile, "--seed", -1)
    assert result.exit_code == 2
    assert "Invalid value for '--seed'" in result.output


def test_sweeps_are_parsed():
    assert parse_sweep("max_num_seqs=8..40,max_num_batched_tokens=256,512") == {
        "max_num_seqs": [8, 16, 32, 40],
        "max_num_batched_tokens": [256, 512],
    }
    assert parse_sweep("itl_target_ms=null,50,scheduling_policy=fcfs") == {
        "itl_target_ms": [None, 50],
        "scheduling_policy": ["fcfs"],
    }


def test_invalid_sweeps_are_rejected():
    for text in ["8,16", "max_num_seqs=", "max_num_seqs=9..3", "max_num_seqs=" + "1," * 401]:
        with pytest.raises(ConfigError, match="--sweep"):
            parse_sweep(text)


@pytest.mark.parametrize("capacity", [0.3, 5.0, 90.0])
def test_the_highest_rate_is_found_from_either_side(capacity):
    report = summarise(run([engine()], [job(0, 1, 1)]), SLO())

    def attempt(rate: float) -> Trial:
        good = 1.0 if rate <= capacity else 0.0
        return Trial({}, msgspec.structs.replace(report, attainment=good), rate)

    assert highest_rate(attempt, 2.0, SLO()).rate == pytest.approx(capacity, rel=0.02)


def of_prompts(profile, *arguments):
    common = ["--scenario", "lognormal", "--requests", 12, "--arrivals", "poisson", "--rate", 4, "--replicas", 2]
    return simulate(profile, *common, "--prefill-replicas", 1, *arguments)


def test_replicas_for_prompts_are_compared_with_as_many_that_do_both(profile, tmp_path):
    results = [of_prompts(profile, "--slo-itl", 0.05, "--report", tmp_path / f"{n}.json") for n in range(2)]
    assert results[0].exit_code == 0, results[0].output
    assert results[0].output.splitlines()[:-1] == results[1].output.splitlines()[:-1], "the same seed, the same result"
    rows = json.loads((tmp_path / "0.json").read_text())
    assert rows == json.loads((tmp_path / "1.json").read_text())
    assert [tuple(row["setting"].values()) for row in rows] == [(3, 0, None), (3, 0, 50), (2, 1, None), (2, 1, 50)]
    assert len({(row["requests"], row["refused"], row["tokens"], row["replicas"]) for row in rows}) == 1
    assert [row["handover"] is None for row in rows] == [True, True, False, False]
    assert rows[2]["handover"]["outcomes"]["handed_over"] > 0
    for line in (
        "3 that do both, target 50 ms ",
        "1 for prompts + 2 ",
        "SLO (2 s to the first token, 250 ms per further ",
    ):
        assert line in results[0].output
    assert "no gap above 50 ms): " in results[0].output and "nan" not in results[0].output


def test_the_target_of_the_comparison_is_that_of_the_options_or_the_slo(profile, tmp_path):
    for arguments, target in ((["--set", "itl_target_ms=33"], 33), (["--slo-tpot", 0.04], 40)):
        result = of_prompts(profile, *arguments, "--handover", "off", "--report", tmp_path / "r.json")
        assert result.exit_code == 0, result.output
        rows = json.loads((tmp_path / "r.json").read_text())
        assert [row["setting"]["itl_target_ms"] for row in rows] == [None, target] * 2
        assert rows[2]["handover"]["outcomes"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--handover", "auto"], "--handover 'auto' needs replicas for prompts: also give --prefill-replicas N"),
        (["--handover-link", "1GB/s:1ms"], "--handover-link '1GB/s:1ms' needs replicas for prompts"),
        (["--prefill-replicas", 0], "Invalid value for '--prefill-replicas'"),
        (["--prefill-replicas", 1, "--handover-link", "-1GB/s:1ms"], "cannot read '-1GB' as a size"),
        (["--prefill-replicas", 1, "--handover-link", "0GB/s:1ms"], "the rate must be more than 0"),
        (["--prefill-replicas", 1, "--handover-link", "1GB:1ms"], "expected RATE:LATENCY"),
        (["--prefill-replicas", 1, "--handover-link", "1GB/s:-1ms"], "expected RATE:LATENCY"),
        (["--prefill-replicas", 1, "--handover-link", "9" * 400 + "GB/s:1ms"], "--handover-link '999"),
        (["--prefill-replicas", 1, "--handover", "fast"], "must be a number of tokens, auto or off"),
        (["--prefill-replicas", 1, "--slo-tpot", 0], "--slo-tpot 0: with --prefill-replicas it is also the engines'"),
        (["--prefill-replicas", 1, "--slo-tpot", "inf"], "--slo-tpot inf: with --prefill-replicas"),
        (["--prefill-replicas", 1, "--slo-itl", 0], "--slo-itl 0: with --prefill-replicas"),
        (["--prefill-replicas", 1, "--sweep", "max_num_seqs=1,2"], "leave out --sweep and --find-replicas"),
        (["--prefill-replicas", 1, "--set", "enable_prefix_caching=false"], "needs enable_prefix_caching=true"),
        (["--prefill-replicas", 1, "--kill", "3:2"], "there is no replica 2 among 2"),
        (["--prefill-replicas", 1, "--kill", "3:0", "--startup", "inf"], "no replica would be left"),
    ],
)
def test_replicas_for_prompts_that_cannot_be_simulated_are_rejected(profile, arguments, message):
    result = simulate(profile, *arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_without_the_gateway_there_are_no_replicas_for_prompts(profile, monkeypatch):
    monkeypatch.setitem(sys.modules, "inflight_gateway.handover_policy", None)
    result = simulate(profile, "--prefill-replicas", 1)
    assert result.exit_code == 2 and "pip install 'triton-inflight[gateway]'" in result.output
