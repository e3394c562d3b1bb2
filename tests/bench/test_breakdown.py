"""bench/peers/breakdown.py with the real decoder: the demo model runs as one native call a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cpu
import cpu_engines
import cpu_report
import pytest
from cpu_engines import RunFailed

from inflight.config import EngineConfig
from inflight.engine.assembly import make_core
from inflight.engine.core import EngineCore
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step_trace import StepTrace
from inflight.loading.forward.native_decoder import NativeDecoder
from inflight.runner.pipeline import make_runner, placed

sys.path.insert(0, str(cpu_engines.PEERS))
from breakdown import break_down

DEMO = str(Path(__file__).parents[2] / "model_repository" / "demo" / "1" / "checkpoint")


def engine(**options: Any) -> tuple[EngineCore, Any]:
    """An engine, and a function that runs three requests and returns the seconds of their phases."""
    config = placed(EngineConfig.from_dict({"model": DEMO, "step_trace": 1000, "cpu_threads": 1, **options}))
    runner = make_runner(config)
    trace = StepTrace(config, runner.info.num_blocks)
    core = make_core(config, runner, listeners=[trace])

    def work() -> dict[str, float]:
        first = len(trace.snapshot().steps)
        for request_id in range(3):
            params = SamplingParams(max_tokens=5, ignore_eos=True)
            assert core.add_request(AddRequest(request_id, [5, 6, 7], params)) is None
        while core.has_work:
            core.step()
        steps = trace.snapshot().steps[first:]
        return {part: sum(getattr(step, part) for step in steps) for part in ("schedule", "forward", "sample")}

    return core, work


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["plain", "ahead"])
def test_the_kinds_of_work_of_a_native_decoder(options: dict[str, Any]) -> None:
    core, work = engine(**options)
    runner = getattr(core.runner, "runner", core.runner)
    assert isinstance(runner.model, NativeDecoder)
    found = break_down(core.runner, work)
    assert found["linear"] > 0 and found["attention"] > 0 and min(found.values()) >= 0
    assert set(found) == {
        "linear", "attention", "norm, rotary, residual, barriers", "Python around the forward pass", "schedule",
        "sample",
    }  # fmt: skip
    assert runner.forward is runner.model, "the decoder is back in its place"


def test_steps_that_do_not_reach_the_decoder_are_an_error_and_no_division_by_zero() -> None:
    core, _ = engine()
    with pytest.raises(RuntimeError, match="ModelRunner do not call its decoder"):
        break_down(core.runner, lambda: {"forward": 1.0})


def test_a_breakdown_that_fails_fails_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, python: str, task: dict[str, Any], limit: float) -> dict[str, Any]:
        if task.get("profile"):
            raise RunFailed("exit status 1: RuntimeError: it broke")
        return {"outputs": [], "tokens_per_second": 1.0, "seconds": 1.0}

    monkeypatch.setattr(cpu.common, "CACHE", tmp_path)
    monkeypatch.setattr(cpu_engines, "run", run)
    monkeypatch.setattr(cpu.Comparison, "measure_rates", lambda self: None)
    monkeypatch.setattr(cpu.Comparison, "store", lambda self: self.record.update(engines={}))
    monkeypatch.setattr(cpu_report, "table", lambda *_: "")
    (tmp_path / "llama-60m-rand").mkdir()
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--requests", "2", "--rounds", "1", "--engines", "inflight"])
    with pytest.raises(SystemExit, match="inflight: breakdown of our time: exit status 1: RuntimeError: it broke"):
        cpu.main()
