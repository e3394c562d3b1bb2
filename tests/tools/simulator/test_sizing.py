"""`inflight simulate --find-replicas`: the number is right, and the values file has what the chart reads."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
import yaml
from simulated import PROFILE, engine, job, simulate
from typer.testing import CliRunner

from inflight_tools.cli import app
from inflight_tools.simulator.incidents import Incidents, Kill
from inflight_tools.simulator.report import summarise
from inflight_tools.simulator.scene import Scene
from inflight_tools.simulator.sizing import fewest, find_size
from inflight_tools.workload.load import Load
from inflight_tools.workload.slo import SLO

STRICT = SLO(ttft=0.5, tpot=0.05, attainment=0.9)
LOAD = Load("uniform", requests=40, arrivals="poisson", rate=30.0)


@pytest.fixture(scope="module")
def blank():
    return summarise(simulate([engine()], [job(0, 1, 1)]), SLO())


def asked(blank, good):
    """A pretended simulation, and the counts it was asked for."""
    counts = []

    def attempt(count):
        counts.append(count)
        return msgspec.structs.replace(blank, attainment=1.0 if good(count) else 0.0, busy=0.5)

    return attempt, counts


def test_the_smallest_count_is_found_with_few_simulations(blank):
    for needed in [1, 2, 7, 8, 9, 100]:
        for start in [1, 6, 300]:
            attempt, counts = asked(blank, lambda count, needed=needed: count >= needed)
            assert fewest(attempt, SLO(), start) == needed
            assert len(set(counts)) <= 20


def test_a_lucky_count_does_not_pass_for_an_answer(blank):
    attempt, _ = asked(blank, lambda count: count in (5, 8) or count >= 10)
    assert fewest(attempt, SLO(), 5) == 10, "6 and 9 miss"


def test_the_search_ends_where_replicas_make_no_difference(blank):
    attempt, counts = asked(blank, lambda count: False)
    assert fewest(attempt, SLO(), 1, limit=64) is None
    assert max(counts) == 64

    def idle(count):
        counts.append(count)
        return msgspec.structs.replace(blank, attainment=0.5, busy=0.01)

    counts.clear()
    assert fewest(idle, SLO(), 1) is None
    assert max(counts) == 2


@pytest.fixture(scope="module")
def size():
    return find_size(Scene(PROFILE, {}, LOAD), STRICT)


def test_a_size_is_the_fewest_that_meets_the_slo(size):
    assert size is not None
    attained = {
        count: summarise(Scene(PROFILE, {}, LOAD, replicas=count).run(), STRICT).attainment
        for count in (size.replicas - 1, size.replicas, size.replicas + 1)
    }
    few, enough, more = attained.values()
    assert few < STRICT.attainment <= min(enough, more)
    assert size.minimum < size.replicas < size.maximum
    assert 1.0 <= size.edge < 2.0
    assert size.at_edge.attainment >= STRICT.attainment
    assert size.waiting_per_replica == max(1, math.floor(size.at_edge.waiting))
    assert 0.01 <= size.kv_cache_usage <= size.at_edge.kv_cache_usage


def test_a_size_that_survives_has_a_spare_one(size):
    spare = find_size(Scene(PROFILE, {}, LOAD), STRICT, survive=1)
    assert spare is not None
    assert size.replicas < spare.replicas <= size.replicas + 2
    half = spare.report.seconds / 2
    lost = Scene(PROFILE, {}, LOAD, replicas=spare.replicas, incidents=Incidents((Kill(half),), startup=math.inf))
    report = summarise(lost.run(), STRICT)
    assert report.incident is not None and report.incident.during.attainment >= STRICT.attainment


@pytest.mark.parametrize(
    ("load", "twice"),
    [
        (Load("uniform", arrivals="poisson", rate=3.0), lambda scene: scene.load.rate == 6.0),
        (Load("bursty"), lambda scene: scene.load.rate == pytest.approx(20 / 12)),
        (Load("lognormal"), lambda scene: scene.users == 80),
    ],
)
def test_a_load_is_scaled_by_what_drives_it(load, twice):
    assert twice(Scene(PROFILE, {}, load).at_load(2.0))


def test_a_trace_is_scaled_by_its_speed(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 2}')
    assert Scene(PROFILE, {}, Load(trace=str(trace), speed=3.0)).at_load(2.0).load.speed == 6.0


@pytest.fixture
def command(tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(PROFILE))
    return lambda *arguments: CliRunner().invoke(app, ["simulate", "--profile", str(path), *map(str, arguments)])


def test_the_values_file_has_the_keys_of_the_chart(command, tmp_path):
    values, report = tmp_path / "deep" / "values.yaml", tmp_path / "r.json"
    result = command(
        "--scenario", "uniform", "--requests", 30, "--arrivals", "poisson", "--rate", 20, "--slo-ttft", 0.5,
        "--slo-tpot", 0.05, "--find-replicas", "--survive", 1, "--values", values, "--report", report,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = yaml.safe_load(values.read_text())
    (row,) = json.loads(report.read_text())
    assert written.keys() == {"replicaCount", "autoscaling"}
    scaling = written["autoscaling"]
    assert scaling.keys() == {"minReplicas", "maxReplicas", "waitingPerReplica", "kvCacheUsage"}
    assert 1 <= scaling["minReplicas"] <= written["replicaCount"] == row["replicas"] <= scaling["maxReplicas"]
    assert scaling["waitingPerReplica"] >= 1 and 0.01 <= scaling["kvCacheUsage"] <= 0.95
    assert f"{written['replicaCount']} replicas, also if 1 of them are lost" in result.output
    assert "uniform, poisson, 20 requests/s" in values.read_text()


def test_an_slo_that_no_number_of_replicas_meets_fails_and_writes_nothing(command, tmp_path):
    values = tmp_path / "values.yaml"
    result = command("--requests", 10, "--slo-ttft", 0, "--find-replicas", "--values", values)
    assert result.exit_code == 1
    assert "no number of replicas up to 2048 answers 90% of the requests within 0 s" in result.output
    assert not values.exists()


def test_incidents_are_options_of_the_command(command):
    result = command(
        "--scenario", "uniform", "--requests", 60, "--arrivals", "poisson", "--rate", 20, "--replicas", 3,
        "--kill", "1:1", "--rollout", 2, "--grace", 0.05, "--startup", 0.5, "--router", "least-waiting",
        "--scrape-interval", 0.1,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "requests resumed elsewhere" in result.output
    assert "during" in result.output and "outside" in result.output


def test_options_that_do_not_fit_are_one_line_and_status_2(command):
    for arguments, message in [
        (["--kill", "soon"], "--kill 'soon': expected SECONDS or SECONDS:REPLICA"),
        (["--kill", "1:1"], "--kill: there is no replica 1 among 1; give one from 0 to 0"),
        (["--values", "v.yaml"], "--values and --survive belong to --find-replicas"),
        (["--find-replicas", "--kill", "1"], "--find-replicas takes no --sweep, --kill or --rollout"),
        (["--rollout", "1", "--startup", "inf"], "--startup inf: no replica would be left"),
        (["--accepted-drafts", "0.5"], "accepted_drafts=0.5 needs drafts that are copied: set speculative_config"),
    ]:
        result = command(*arguments)
        assert result.exit_code == 2
        assert message in result.output
        assert result.output.count("\n") == 1
