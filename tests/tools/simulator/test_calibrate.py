"""Calibration of a real, tiny checkpoint: it covers its design, leaves the engine clean, and can be simulated."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from checkpoints import make_checkpoint
from typer.testing import CliRunner

from inflight.config import ConfigError, EngineConfig
from inflight.engine.integrity import check_core
from inflight_tools.cli import app
from inflight_tools.simulator.calibrate import calibrate, load_engine
from inflight_tools.simulator.check import compare
from inflight_tools.simulator.profile import find_profile
from inflight_tools.workload.load import Load

OPTIONS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 6, "max_num_batched_tokens": 64, "cpu_threads": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoints"))


def engine(checkpoint, **options):
    return load_engine(EngineConfig.from_dict({"model": checkpoint, "kv_cache_memory": "4MiB", **OPTIONS, **options}))


def test_costs_are_measured_and_predict_a_run(checkpoint):
    core = engine(checkpoint)
    budget = core.scheduler.policies.budget
    lines: list[str] = []
    profile = calibrate(core, "tiny", 0.0, lines.append)
    assert len(lines) == 3
    assert core.scheduler.policies.budget is budget
    check_core(core)
    assert (profile.name, profile.checkpoint, profile.num_blocks) == ("tiny", "llama", core.info.num_blocks)
    assert profile.options["max_num_seqs"] == 6
    assert profile.fit.batches > 30
    assert min(*profile.device.seconds_at, *profile.host.seconds_at) >= 0
    predicted, measured = compare(core, profile, Load("uniform", requests=8, context=200), users=4)
    assert predicted.tokens == measured.tokens == 8 * 64
    assert min(predicted.seconds, measured.seconds, predicted.itl.p99, measured.ttft.p50) > 0
    check_core(core)


def test_a_pool_too_small_to_measure_is_rejected(checkpoint):
    core = engine(checkpoint, max_model_len=16)
    with pytest.raises(ConfigError, match="raise max_model_len or kv_cache_memory"):
        calibrate(core, "tiny", 0.0)


def test_the_command_writes_a_profile_that_simulate_accepts(checkpoint, tmp_path):
    config, output = tmp_path / "model.json", tmp_path / "new" / "mine.json"
    config.write_text(json.dumps({"model": checkpoint, "num_gpu_blocks_override": 64, **OPTIONS, "max_num_seqs": 2}))
    run = CliRunner()
    done = run.invoke(app, ["calibrate", "--config", str(config), "-o", str(output), "--seconds", "0"])
    assert done.exit_code == 0, done.output
    assert find_profile(str(output)).name == "mine"
    simulated = run.invoke(app, ["simulate", "--profile", str(output), "--requests", "5"])
    assert simulated.exit_code == 0, simulated.output
    assert "requests      5 in" in simulated.output


def test_without_the_backends_packages_it_says_how_to_install_them(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from inflight_tools.cli import app; app(['calibrate', '--model', 'a/b', '-o', sys.argv[1]])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert (
        done.stderr == "inflight: torch not found; calibrate runs the engine: pip install 'triton-inflight[backend]'\n"
    )


def test_a_checkpoint_that_cannot_be_loaded_fails_with_its_reason(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["calibrate", "--model", str(tmp_path), "-o", str(tmp_path / "p.json")])
    assert result.exit_code == 1
    assert "is not a readable checkpoint" in result.output
    assert not (tmp_path / "p.json").exists()


def test_wrong_input_is_named_before_anything_is_loaded():
    for arguments, message, status in [
        (["-o", "profile.json"], "give --model CHECKPOINT, or --config model.json", 2),
        (["-o", "profile.txt", "--model", "x"], "profile.txt: must be a .json file", 2),
        (["-o", "profile.json", "--model", "./nowhere"], "no such directory", 2),
        (["-o", "profile.json", "--model", "x", "--set", "max_num_seq=3"], "unknown key 'max_num_seq'", 2),
    ]:
        result = CliRunner().invoke(app, ["calibrate", *arguments])
        assert result.exit_code == status
        assert message in result.output
