"""The step trace of an engine in-process, as in docs/tracing.md."""

from __future__ import annotations

from pathlib import Path

from inflight import LLM, SamplingParams
from inflight_tools.trace.files import render

CHECKPOINT = Path(__file__).parents[3] / "model_repository" / "demo" / "1" / "checkpoint"


def test_llm_traces_its_steps(tmp_path):
    llm = LLM(str(CHECKPOINT), dtype="float32", device="cpu", kv_cache_memory="32MiB", cpu_threads=1, step_trace=True)
    params = [SamplingParams(max_tokens=count, ignore_eos=True, seed=1) for count in (3, 6)]
    llm.generate(["Return a list of", "Raise ValueError if"], params)
    trace = llm.trace.snapshot()
    assert [len(step.keys) for step in trace.steps] == [2, 2, 2, 1, 1, 1]
    assert [request.num_output_tokens for request in trace.requests] == [3, 6]
    for step in trace.steps:
        assert min(step.schedule, step.forward, step.sample, step.update) > 0
        assert step.send == 0, "nothing is sent in-process"
    assert b"<!doctype html>" in render(trace, "html")
