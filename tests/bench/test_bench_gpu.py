"""bench/gpu.py itself, with tiny shapes in the Triton language's interpreter: it runs, and its checks pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_attention
import gpu_decode
import gpu_engine
import gpu_model
import gpu_options
import gpu_rates
import gpu_rows
import gpu_stages
import pytest
import torch

from inflight.kernels.gpu.gpu_attention_configs import Tile

ROOT = Path(__file__).parents[2]


CHECKS = ("error", "tokens", "tests")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_all_stages_with_toy_shapes(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "all", "--device", "cpu", "--tiny", "--budget", "3000"]
    done = subprocess.run(command, env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_all_cpu.json"]
    record = json.loads((tmp_path / "gpu_all_cpu.json").read_text())
    assert set(record) >= {"command", "date", "card", "versions", "budget", "stages", "rows"}
    assert [stage["stage"] for stage in record["stages"]] == [stage.name for stage in gpu_stages.STAGES]
    assert {stage["status"] for stage in record["stages"]} == {"ok"}
    rows = {stage.name: [row for row in record["rows"] if row["stage"] == stage.name] for stage in gpu_stages.STAGES}
    for name, found in rows.items():
        assert found, f"{name} has no row"
        assert all(row["card"] == "cpu" and row["date"] and row["versions"]["torch"] for row in found)
        statuses = {row["status"] for row in found if "status" in row}
        assert statuses <= {"refused", "left out", "not built"}, name
        assert all(gpu_rows.line(row) in done.stdout for row in found)
    assert {row["rate"] for row in rows["rates"]} == {"copy", "read", "gemm"}
    assert {row["shape"] for row in rows["tests"]} == {f"tests/gpu/{p.name}" for p in ROOT.glob("tests/gpu/test_*.py")}
    checked = [row for row in rows["kernels"] if row["unit"] in CHECKS]
    assert {row["name"].split()[0] for row in checked} == {
        "rms_norm", "add_rms_norm", "rotary", "rotate_and_write", "silu_and_mul", "sampling", "attention",
    }  # fmt: skip
    assert all(row["passed"] for row in checked)
    for name in ("decode", "serve", "prefill", "options", "lora", "arrivals"):
        assert any(row.get("achieved", 0) > 0 for row in rows[name]), name
    peer = next(row for row in rows["serve"] if row["name"] == "serve, transformers")
    if find_spec("psutil") is None:
        assert "psutil" in peer["why"]
    else:
        assert "sdpa, its slow one" in peer["note"]
    names = {row["name"] for row in rows["options"]}
    assert names == {f"option: {name}" for load in gpu_options.LOADS for name in ("off", *load.switches)}


@pytest.mark.nightly
def test_a_failed_check_is_the_exit_status(tmp_path: Path) -> None:
    """The kernel under test is broken on purpose."""
    script = (
        "import sys, gpu, gpu_attention, gpu_ops\n"
        "gpu_ops.sampling_check_rows = gpu_ops.timed_rows = gpu_ops.sampling_rows = lambda *_: []\n"
        "gpu_attention.run = lambda *_: []\n"
        "broken = {'silu_and_mul': lambda self, x: x[:, ::2] * 1.0}\n"
        "gpu_ops.KERNELS = type('Broken', (gpu_ops.GpuOps,), broken)()\n"
        "sys.argv = ['bench/gpu.py', 'kernels', '--device', 'cpu', '--quick']\n"
        "sys.exit(gpu.main())"
    )
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHONPATH": f"{ROOT / 'bench'}{os.pathsep}{ROOT / 'backend'}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "silu_and_mul is right" in done.stdout
    assert "MISSED" in done.stdout
    assert "checks passed" in done.stdout
    record = json.loads((tmp_path / "gpu_kernels_cpu.json").read_text())
    assert set(record) >= {"command", "date", "card", "versions", "seconds", "rates", "rows"}
    assert set(record["rates"]) == {"copy", "gemm"}


def test_the_integers_that_a_rate_is_measured_on_do_not_overflow() -> None:
    numbers = torch.full((2 * 64,), 2**31 - 1, dtype=torch.int32)
    numbers[64:] = torch.arange(64)
    largest = numbers.new_empty(2)
    gpu_rates._max_kernel[(2,)](numbers, largest, BLOCK=64)
    assert largest.tolist() == [2**31 - 1, 63]


def test_limits_add_what_earlier_stages_left() -> None:
    stages = (gpu_stages.Stage("a", 10, "", ""), gpu_stages.Stage("b", 90, "", ""), gpu_stages.Stage("c", 400, "", ""))
    assert gpu_stages.limits(stages, 0, 500, budget=500) == 10
    assert gpu_stages.limits(stages, 1, 496, budget=500) == 96  # stage 0 took 4 s
    assert gpu_stages.limits(stages, len(stages) - 1, 300, budget=500) == 300
    assert gpu_stages.limits(stages, 0, 250, budget=250) == 5
    assert gpu_stages.limits(stages[:1], 0, 60, budget=60) == 60
    assert gpu_stages.limits(stages, 1, 30, budget=500) == 0


def test_how_a_process_ended() -> None:
    for script, status in [
        ("exit 0", "ok"),
        ("exit 3", "exit status 3"),
        ("kill -SEGV $$", "killed by SIGSEGV"),
    ]:
        assert gpu_stages.run_command(["sh", "-c", script], limit=100) == status


def stage_args(rows: Path) -> SimpleNamespace:
    return SimpleNamespace(stage="fake", rows=rows, seconds=100.0, device="cpu", tiny=True)


def test_a_stage_that_crashes_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_stage.py").write_text(
        "def rows(run):\n"
        "    assert 0 < run.seconds_left < 100\n"
        "    yield dict(name='first', shape='', achieved=1, unit='ms')\n"
        "    raise ValueError('broken')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gpu_stages, "STAGES", (gpu_stages.Stage("fake", 1, "fake_stage:rows", ""),))
    file = tmp_path / "rows"
    with pytest.raises(ValueError, match="broken"):
        gpu_stages.run_stage(stage_args(file))
    first, last = gpu_rows.read(file)
    assert (first["stage"], first["name"], first["card"]) == ("fake", "first", "cpu")
    assert (last["status"], last["why"]) == ("failed", "ValueError: broken")
    with file.open("a") as half:
        half.write('{"name": "ha')  # killed while it wrote
    assert len(gpu_rows.read(file)) == 2


def test_a_lost_stage_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, limits = [], []

    def run_command(command: list[str], limit: float) -> str:
        limits.append(limit)
        name, rows = command[3], Path(command[command.index("--rows") + 1])
        started.append(name)
        about = dict(stage=name, card="H200", date="", versions={}, name="row", shape="", achieved=1, unit="ms")
        gpu_rows.append(rows, about)
        return "killed by SIGKILL" if name == "tests" else "ok"

    monkeypatch.setattr(gpu_stages, "run_command", run_command)
    args = SimpleNamespace(only=None, output=tmp_path, budget=500.0, device="cuda", tiny=False)
    assert gpu_stages.run_all(args) == 1
    record = json.loads((tmp_path / "gpu_all_h200.json").read_text())
    assert started == [stage.name for stage in gpu_stages.STAGES] == [row["stage"] for row in record["rows"]]
    assert [stage["stage"] for stage in record["stages"] if stage["status"] != "ok"] == ["tests"]
    args = SimpleNamespace(only=["rates"], output=tmp_path / "one.json", budget=None, device="cuda", tiny=False)
    assert gpu_stages.run_all(args) == 0
    assert limits[-1] == pytest.approx(gpu_stages.STAGES[0].seconds, abs=1), "its own share, and no other's"
    assert [row["stage"] for row in json.loads((tmp_path / "one.json").read_text())["rows"]] == ["rates"]


def test_what_a_step_reads_and_multiplies() -> None:
    run = gpu_rows.Run("cpu", True, 0.0, Path())
    for config in (gpu_model.llama_8b(run), gpu_model.qwen3_06b(run)):
        model = gpu_model.random_model(config, torch.float32, "sdpa", torch.device("cpu"))
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        work = gpu_model.Work(config, 4)
        assert work.weights == sum(module.weight.numel() for module in linear)
        assert work.decode_bytes(3, 10) == 4 * work.weights + 3 * 10 * work.kv_bytes
        pair = 2 * 2 * 2 * 4 * 16  # query by key, weight by value; layers, heads, head size
        assert work.decode_flops(3, 10) == 3 * (2 * work.weights + 10 * pair)
        assert work.kv_bytes == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head size, bytes
        head = config.vocab_size * config.hidden_size
        assert work.prefill_flops(5) == 2 * 5 * (work.weights - head) + 2 * head + (1 + 2 + 3 + 4 + 5) * pair
    large = gpu_model.Work(gpu_model.llama_8b(gpu_rows.Run("cuda", False, 0.0, Path())), 2)
    assert (large.weights, large.kv_bytes) == (7_504_658_432, 128 * 1024)


def test_schedules_of_a_decode() -> None:
    core = SimpleNamespace(info=SimpleNamespace(vocab_size=100, num_blocks=40), config=SimpleNamespace(block_size=16))
    outs = gpu_decode.decode_steps(core, rows=3, context=30, steps=5)
    blocks = [block for row in outs[0].new_rows for block in row.block_ids]
    assert len(set(blocks)) == len(blocks) == 3 * 3  # 30 tokens and 5 more
    assert all(0 <= block < 40 for block in blocks)
    assert [out.num_computed_tokens for out in outs] == [[29 + step] * 3 for step in range(5)]
    assert all(out.num_tokens == 3 and out.samples == [True] * 3 for out in outs)
    assert [len(out.new_rows) for out in outs] == [3, 0, 0, 0, 0]


def test_a_timed_decode_reads_more_than_the_cache() -> None:
    for shape in gpu_attention.cases():
        size = sum(shape.seq_lens) * shape.spec.bytes_per_token(torch.bfloat16)
        if shape.bound == "bytes":
            assert gpu_attention.num_pools(shape, size) * size >= 2**29
    lonely = next(shape for shape in gpu_attention.cases() if shape.name == "decode 1 x 32K")
    assert gpu_attention.num_pools(lonely, 2**27) == 4


class SlowCore:
    """Each step takes no time and gives every request a token; a request has two."""

    def __init__(self) -> None:
        self.added: list[tuple[float, int]] = []
        self.live: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add_request(self, message: Any) -> None:
        self.added.append((time.perf_counter(), message.request_id))
        self.live[message.request_id] = 2

    def step(self) -> SimpleNamespace:
        deltas = [SimpleNamespace(request_id=number, token_ids=[7]) for number in self.live]
        self.live = {number: left - 1 for number, left in self.live.items() if left > 1}
        return SimpleNamespace(deltas=deltas)


def test_gaps_of_watched_requests_that_arrive_by_the_clock() -> None:
    load = [gpu_engine.Request(at, [1], 2, watched) for at, watched in ((0.2, True), (0.1, False), (0.0, True))]
    core, begun = SlowCore(), time.perf_counter()
    gaps = gpu_engine.itl_gaps(core, load)
    assert len(gaps) == 2
    assert [number for _, number in core.added] == [0, 1, 2]
    assert all(when - begun >= at for (when, _), at in zip(core.added, (0.0, 0.1, 0.2)))


@pytest.mark.nightly
def test_a_peer_that_takes_too_long_is_stopped_and_left_out(tmp_path: Path) -> None:
    run = gpu_rows.Run("cpu", True, deadline=0.0, file=tmp_path / "rows")
    floor, ours, theirs = gpu_engine.serve(run)
    assert ours["achieved"] > 0 and ours["limit"] == floor["achieved"] > 0
    assert theirs["status"] == "left out"
    assert theirs["why"].startswith("no time left: 0 of 4 requests ended in ")


def test_tuning_compares_the_shipped_tile_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = [gpu_attention.tiny(shape) for shape in gpu_attention.cases()]
    monkeypatch.setattr(gpu_attention, "cases", lambda: tiny)
    monkeypatch.setattr(gpu_attention, "compile_ahead", lambda jobs: None)
    tiles = {"decode 64 x 2K": (Tile(0, 16, 4, 2),), "a batch that this card cannot run": (Tile(0, 16, 4, 2),)}
    rows = list(gpu_attention.tune(torch.device("cpu"), tiles))
    assert {row["tile"] for row in rows} == {"shipped", str(Tile(0, 16, 4, 2))}
    assert {row["shape"] for row in rows} == {"decode 64 x 2K"}


def test_tuning_that_is_stopped_keeps_what_it_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: Any) -> Iterator[dict[str, Any]]:
        yield {"name": "tile", "microseconds": 7.0}
        raise KeyboardInterrupt

    output = tmp_path / "tune.json"
    monkeypatch.setattr(gpu_attention, "tune", stopped)
    monkeypatch.setattr(sys, "argv", ["gpu_attention.py", "--tune", "--output", str(output)])
    with pytest.raises(KeyboardInterrupt):
        gpu_attention.main()
    assert json.loads(output.read_text())["rows"] == [{"name": "tile", "microseconds": 7.0}]
