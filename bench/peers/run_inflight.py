"""Inflight's EngineCore in-process, stepped in a loop: no text, no process boundary.

With `profile` in the job, the run is not timed; its result is a breakdown of the steps' time (breakdown.py).
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import job

if TYPE_CHECKING:
    from inflight.engine.adapter import AdapterRef
    from inflight.engine.attached import Attached
    from inflight.engine.core import EngineCore
    from inflight.engine.step_trace import StepRecord, StepTrace

KV_DTYPES = {"bf16": "auto", "fp32": "auto", "u8": "int8"}
PARTS = ("schedule", "forward", "sample", "update")


@dataclass
class LoadedEngine:
    """The core, how long its parts took to load, and the number of steps before the last `generate`."""

    core: EngineCore
    trace: StepTrace
    load_parts: dict[str, float]
    first_step: int = 0

    @property
    def steps(self) -> list[StepRecord]:
        return self.trace.snapshot().steps[self.first_step :]


def options(task: dict[str, Any]) -> dict[str, Any]:
    """The engine's `model.json`."""
    return {
        "model": task["checkpoint"],
        "dtype": job.TORCH_DTYPES[task["weights"]],
        "kv_cache_dtype": KV_DTYPES[task["kv"]],
        "max_num_seqs": task["max_num_seqs"],
        "cpu_threads": task["threads"],
        "kv_cache_memory": f"{task['kv_gib']}GiB",
        "enable_prefix_caching": False,
        "max_model_len": 4096,
        **task["options"],
    }


def load(task: dict[str, Any]) -> LoadedEngine:
    # As the engine process does before it imports torch.
    gc.disable()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(task["threads"])
    start, born = time.perf_counter(), time.time() - task["started"]
    from inflight.config import EngineConfig
    from inflight.engine.assembly import make_core
    from inflight.engine.step_trace import StepTrace
    from inflight.runner.pipeline import make_runner, placed
    from inflight.worker import settle_garbage_collector

    imported = time.perf_counter()
    config = placed(EngineConfig.from_dict({**options(task), "step_trace": 1_000_000}))
    runner = make_runner(config)
    trace = StepTrace(config, runner.info.num_blocks)
    core = make_core(config, runner, listeners=[trace])
    settle_garbage_collector()
    parts = {"interpreter": born, "imports": imported - start, "engine": time.perf_counter() - imported}
    return LoadedEngine(core, trace, parts)


def generate(engine: LoadedEngine, requests: list[dict[str, Any]]) -> list[list[int]]:
    from inflight.engine.messages import AddRequest
    from inflight.engine.sampling_params import SamplingParams

    engine.first_step += len(engine.steps)
    outputs: list[list[int]] = [[] for _ in requests]
    for index, request in enumerate(requests):
        params = SamplingParams(temperature=request.get("temperature", 0.0), max_tokens=request["out"], ignore_eos=True)
        message = AddRequest(index, request["prompt"], params, attached=attached(request))
        failure = engine.core.add_request(message)
        assert failure is None, failure
    while engine.core.has_work:
        for delta in engine.core.step().deltas:
            outputs[delta.request_id] += delta.token_ids
    return outputs


def attached(request: dict[str, Any]) -> Attached | None:
    from inflight.engine.attached import Attached

    folder = request.get("adapter")
    return None if folder is None else Attached(adapter=adapter_of(Path(folder)))


@cache
def adapter_of(folder: Path) -> AdapterRef:
    from inflight.adapters.spec import describe_adapter

    return describe_adapter(folder, folder.name, 64)


def steps(engine: LoadedEngine) -> dict[str, Any]:
    """The work of each step, for the floor, and the time of the parts summed over the steps."""
    made = engine.steps
    return {
        "load_parts": engine.load_parts,
        "step_parts": {part: sum(getattr(step, part) for step in made) for part in PARTS},
        "steps": [[step.tokens, step.computed, step.samples] for step in made],
    }


def profiled(task: dict[str, Any]) -> dict[str, Any]:
    engine = load(task)
    from breakdown import break_down

    def work() -> dict[str, float]:
        generate(engine, task["requests"])
        return steps(engine)["step_parts"]

    generate(engine, task["warm_up"])
    return {"breakdown": break_down(engine.core.runner, work)}


if __name__ == "__main__":
    if job.read().get("profile"):
        job.write(profiled(job.read()))
    else:
        job.run(["triton-inflight", "torch", "transformers"], load, generate, steps)
