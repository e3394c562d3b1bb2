"""Measures what a step costs on this machine, with batches that span what a load can contain.

Each point of the design computes prompts in chunks (beside the decodes of those already computed),
decodes them for some steps, and adds one more prompt.  The load and times of every step are recorded, and
costs are fitted to the mean of each load over the rounds.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from inflight.config import ConfigError, EngineConfig
from inflight.engine.assembly import make_core
from inflight.engine.core import EngineCore
from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.messages import AddRequest
from inflight.engine.policies.cost_model import StepCost, StepLoad, step_load
from inflight.engine.request import Request, SamplingParams
from inflight_tools.simulator.fit import fit_cost
from inflight_tools.simulator.profile import FitError, Profile

__all__ = ["calibrate", "describe_machine", "load_engine"]

_BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
_CONTEXTS = (16, 128, 512, 1536, 6144)
_CHUNKS = (64, 256, 1024)
_MIXED_CHUNKS = (16, 64, 256)
_SHORT = 128  # tokens of context; longer contexts are measured at every second batch size
_DECODE_STEPS = 6
_MIXED_PROMPT = 512
_MAX_TOKENS = 8192  # of the prompts at one point of the design
_MIN_ROUNDS = 3
_PACKAGES = ("triton-inflight", "torch", "transformers", "numpy")


@dataclass(eq=False)
class _Steps(EngineListener):
    """Replaces the budget policy, to cap the chunks, and records the cost of every step."""

    cap: int = 1
    recorded: list[tuple[StepLoad, float]] = field(default_factory=list)

    def grant(self, request: Request, missing: int, limit: int) -> int:
        return min(limit, self.cap)

    def step_done(self, step: DoneStep) -> None:
        self.recorded.append((step_load(step.out), step.result.ended - step.start))


@dataclass(frozen=True)
class _Point:
    """`batch` sequences of `context` tokens, computed in chunks of `chunk`."""

    batch: int
    context: int
    chunk: int


def load_engine(config: EngineConfig) -> EngineCore:
    """The engine to measure: without prefix caching, one step at a time.

    Raises:
        ConfigError, LoadError: the checkpoint or the options cannot be used.
    """
    from inflight.runner.model_runner import ModelRunner
    from inflight.runner.pipeline import placed

    changes: dict[str, Any] = {"enable_prefix_caching": False, "async_scheduling": False, "max_queue_size": 0}
    changes["speculative_config"] = (
        None  # random tokens are no text, and rows are to have the length that was asked for
    )
    config = msgspec.structs.replace(placed(config), **changes)
    return make_core(config, ModelRunner(config))


def calibrate(
    core: EngineCore, name: str, seconds: float = 60.0, tell: Callable[[str], None] = lambda line: None
) -> Profile:
    """Measure the costs of `core`'s steps.

    Args:
        core: idle, from `load_engine`.
        name: name of the profile.
        seconds: no round begins later than this, but `_MIN_ROUNDS` are run in any case.
        tell: receives a line about the progress of each round.

    Raises:
        ConfigError: the pool or the context is too small to measure anything.
    """
    points = list(_design(core))
    if not points:
        raise ConfigError("nothing to measure: 16 tokens do not fit; raise max_model_len or kv_cache_memory")
    device: dict[StepLoad, list[float]] = defaultdict(list)
    host: dict[StepLoad, list[float]] = defaultdict(list)
    start, rounds = time.monotonic(), 0
    budget = core.scheduler.policies.budget
    try:
        _round(core, points)  # warms up weights, pool and scratch memory
        while rounds < _MIN_ROUNDS or time.monotonic() - start < seconds:
            for load, on_device, on_host in _round(core, points):
                device[load].append(on_device)
                host[load].append(on_host)
            rounds += 1
            tell(f"round {rounds}: {len(device)} kinds of batches, {time.monotonic() - start:.0f} s")
    finally:
        core.scheduler.policies.budget = budget
    cost, error = _fit(device)
    info: Any = core.info
    return Profile(
        name=name,
        date=date.today().isoformat(),
        machine=describe_machine(info.device),
        versions={**{package: version(package) for package in _PACKAGES}, "python": platform.python_version()},
        checkpoint=Path(core.config.model).name,
        options=_options(core, info),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        num_blocks=info.num_blocks,
        bytes_per_block=info.kv_bytes // info.num_blocks,
        swap_seconds_per_block=info.swap_seconds_per_block,
        device=cost,
        host=_fit(host)[0],
        fit=error,
    )


def describe_machine(device: str) -> str:
    """The GPU, or the CPU with the number of cores that this process can use."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def _options(core: EngineCore, info: Any) -> dict[str, Any]:
    """The options that costs depend on, as the engine resolved them, and the options that a simulation starts from."""
    config = core.config
    options = {
        "dtype": info.dtype,
        "device": info.device.split(":")[0],
        "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.step_tokens,
        "cpu_threads": config.cpu_threads,
        "kv_cache_dtype": config.kv_cache_dtype,
        "attention_backend": info.attention_backend,
    }
    return {key: value for key, value in options.items() if value is not None}


def _design(core: EngineCore) -> Iterator[_Point]:
    """Batches and contexts that the engine has room for; the largest contexts with the fewest sequences."""
    config = core.config
    chunks = 0
    for context in _CONTEXTS:
        for batch in _BATCHES if context <= _SHORT else _BATCHES[::2]:
            longest = context + _DECODE_STEPS + len(_MIXED_CHUNKS)
            blocks = (batch + 1) * core.pool.blocks_for(longest) + core.pool.blocks_for(_MIXED_PROMPT)
            fits = blocks <= core.pool.num_blocks and longest < core.info.max_model_len
            if fits and batch < config.max_num_seqs and batch * context <= _MAX_TOKENS:
                yield _Point(batch, context, _CHUNKS[chunks % len(_CHUNKS)])
                chunks += 1


def _round(core: EngineCore, points: list[_Point]) -> list[tuple[StepLoad, float, float]]:
    """(load, device seconds, host seconds) of every step of the design."""
    found: list[tuple[StepLoad, float, float]] = []
    for point in points:
        found += _measure(core, point)
    return found


def _measure(core: EngineCore, point: _Point) -> list[tuple[StepLoad, float, float]]:
    steps = _Steps(point.chunk)
    core.scheduler.policies.budget = steps
    core.listeners.append(steps)
    wall: list[float] = []
    rng = np.random.default_rng(point.batch * 100_000 + point.context)

    def add(request_id: int, num_tokens: int, outputs: int) -> None:
        prompt = rng.integers(0, core.info.vocab_size, num_tokens).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, seed=0)
        failure = core.add_request(AddRequest(request_id, prompt, params))
        assert failure is None, failure.message

    def step() -> None:
        start = time.monotonic()
        core.step()
        wall.append(time.monotonic() - start)

    for request_id in range(point.batch):
        add(request_id, point.context, core.info.max_model_len)
    while any(request.num_computed_tokens < point.context for request in core.scheduler.running) or not wall:
        step()
        if len(wall) > _MAX_TOKENS:
            raise AssertionError("the prompts of the design never end")
    for _ in range(_DECODE_STEPS):
        step()
    # Chunks of every size beside the decodes.
    mixed = min(_MIXED_PROMPT, core.info.max_model_len - 2)
    add(point.batch, mixed, 1)
    for cap in _MIXED_CHUNKS:
        steps.cap = cap
        step()
    for request_id in range(point.batch + 1):
        core.abort(request_id)
    assert not core.has_work
    core.listeners.remove(steps)
    return [(load, seconds, max(1e-6, total - seconds)) for (load, seconds), total in zip(steps.recorded, wall)]


def _fit(measured: dict[StepLoad, list[float]]) -> tuple[StepCost, FitError]:
    """Fit the cost to the mean of each load."""
    means = [(load, statistics.fmean(times)) for load, times in measured.items()]
    cost = fit_cost(means)
    errors = [abs(seconds / cost.seconds(load) - 1) for load, seconds in means]
    return cost, FitError(batches=len(means), mean=statistics.fmean(errors), worst=max(errors))
