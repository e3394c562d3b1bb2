"""Decode steps and prefills of a runner, driven by schedules made here: stages `decode` and `prefill`.

The KV of a decode's context is taken as computed, which saves the prefill of half a million tokens; its values
do not change the time of a step.
"""

from __future__ import annotations

import re
import statistics
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import gpu_rates
import numpy as np
import torch
from gpu_model import Work, engine, graphs_captured, llama_8b, qwen3_06b, refused, words
from gpu_rows import Run
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from inflight.engine.core import EngineCore
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput

__all__ = ["covered", "decode", "decode_steps", "prefill", "prefill_step"]

_STEPS = 100  # per batch, at most
_WARM_UP, _PROFILED = 4, 5
_LAUNCH = re.compile(r"^(cuda|cu)(LaunchKernel|GraphLaunch)")
# Rows of the batch -> the most that a step may take over its floor of bytes (H200, bfloat16).
_TARGETS = {1: 1.3, 16: 1.3, 64: 1.3, 256: 1.4}
_SMALL_MODEL_TARGET = 1.5
_PREFILL_TARGET = 0.6


def _new_row(slot: int, tokens: np.ndarray, block_ids: list[int]) -> NewRow:
    params = SamplingParams(temperature=0.0, max_tokens=_STEPS + 1, ignore_eos=True)
    return NewRow(slot, slot, 0, tokens.astype(np.int32).tobytes(), len(tokens), block_ids, params, slot)


def decode_steps(core: EngineCore, rows: int, context: int, steps: int) -> list[SchedulerOutput]:
    """Schedules of `steps` steps of `rows` requests; the first step computes position `context` - 1.

    Blocks are scattered over the whole pool, as in a server that has run for a while.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, core.info.vocab_size, (rows, context))
    blocks = -(-(context + steps) // core.config.block_size)
    chosen = rng.permutation(core.info.num_blocks)[: rows * blocks].reshape(rows, blocks).tolist()
    new_rows = [_new_row(slot, tokens[slot], chosen[slot]) for slot in range(rows)]
    return [
        SchedulerOutput(
            slots=list(range(rows)),
            num_scheduled_tokens=[1] * rows,
            num_computed_tokens=[context - 1 + step] * rows,
            samples=[True] * rows,
            num_tokens=rows,
            new_rows=new_rows if step == 0 else [],
        )
        for step in range(steps)
    ]


def prefill_step(core: EngineCore, tokens: int) -> SchedulerOutput:
    """One prompt of `tokens` tokens in one step."""
    prompt = np.random.default_rng(0).integers(3, core.info.vocab_size, tokens)
    return SchedulerOutput(
        slots=[0],
        num_scheduled_tokens=[tokens],
        num_computed_tokens=[0],
        samples=[True],
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        new_rows=[_new_row(0, prompt, list(range(-(-tokens // core.config.block_size))))],
    )


def run_steps(core: EngineCore, outs: Sequence[SchedulerOutput]) -> float:
    """Seconds per step, from the first launch until the last token has arrived."""
    in_flight = 2 if core.config.async_scheduling else 1
    tickets: deque[Any] = deque()
    begun = time.perf_counter()
    for out in outs:
        tickets.append(core.runner.launch(out))
        if len(tickets) == in_flight:
            core.runner.collect(tickets.popleft())
    while tickets:
        core.runner.collect(tickets.popleft())
    return (time.perf_counter() - begun) / len(outs)


def device_share(core: EngineCore, outs: Sequence[SchedulerOutput]) -> dict[str, float]:
    """Per step: `launches` by the host, and `busy` seconds in which the GPU runs at least one kernel or copy.

    Empty if the profiler sees no GPU.  It slows the host down, but not the kernels: the time of a step is measured
    without it.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run_steps(core, outs)
    events = [event for event in profiler.events() or [] if not getattr(event, "is_user_annotation", False)]
    spans = [(event.time_range.start, event.time_range.end) for event in events if event.device_type == DeviceType.CUDA]
    if not spans:
        return {}
    launches = sum(bool(_LAUNCH.match(event.name)) for event in events)
    return {"launches": launches / len(outs), "busy": covered(spans) / 1e6 / len(outs)}


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _decode_row(run: Run, core: EngineCore, work: Work, rows: int, context: int) -> dict[str, Any]:
    """Time of a step over its floors; launches and idle share of the GPU."""
    rates = gpu_rates.measured(run)
    steps = 3 if run.tiny else _STEPS
    outs = decode_steps(core, rows, context, _WARM_UP + steps + _PROFILED)
    run_steps(core, outs[:_WARM_UP])
    spent = run_steps(core, outs[_WARM_UP : _WARM_UP + steps])
    middle = context + _WARM_UP + steps // 2
    by_bytes = work.decode_bytes(rows, middle) / rates["read"]
    floor = max(by_bytes, work.decode_flops(rows, middle) / rates["gemm"])
    row = dict(achieved=spent * 1e3, limit=by_bytes * 1e3, ratio=spent / by_bytes, unit="ms",
               over_roofline=spent / floor, tokens_per_second=rows / spent)  # fmt: skip
    if run.device == "cuda" and (share := device_share(core, outs[-_PROFILED:])):
        row |= dict(launches=share["launches"], gpu_idle=max(0.0, 1 - share["busy"] / spent))
    return row


def _misfit(core: EngineCore, work: Work, rows: int, context: int) -> str | None:
    """Why the batch cannot run, if it cannot."""
    tokens = rows * (context + _STEPS + _WARM_UP + _PROFILED + core.config.block_size)
    room = core.info.num_blocks * core.config.block_size
    if tokens <= room:
        return None
    return f"its KV takes {tokens * work.kv_bytes / 2**30:.1f} GiB of {room * work.kv_bytes / 2**30:.1f} GiB"


def decode(run: Run) -> Iterator[dict[str, Any]]:
    """Stage `decode`."""
    large, small = llama_8b(run), qwen3_06b(run)
    shapes = [(rows, context) for context in (1024, 8192) for rows in (1, 16, 64, 256)]
    if run.tiny:
        shapes = [(2, 20), (3, 40)]
    for mode in ("graphs", "eager"):  # what has the targets first
        if mode == "graphs" and run.device == "cpu":
            yield dict(name="decode, graphs", shape="", status="left out", why="a CPU captures no CUDA graphs")
            continue
        for config, batches in ((large, shapes), (small, shapes[:1] if run.tiny else [(64, 1024)])):
            yield from _decode_rows(run, config, batches, mode, None if run.tiny else config is large)


def _decode_rows(
    run: Run, config: Any, shapes: list[tuple[int, int]], mode: str, large: bool | None
) -> Iterator[dict[str, Any]]:
    """The rows of one model: `large` says which targets it has, None that it has none."""
    name, work = f"decode {words(config)}, {mode}", Work(config, 4 if run.tiny else 2)
    longest = max(context for _, context in shapes) + _STEPS + _WARM_UP + _PROFILED
    options = dict(max_num_seqs=max(rows for rows, _ in shapes), max_model_len=longest, enforce_eager=mode == "eager")
    if run.tiny:
        options["num_gpu_blocks_override"] = 64
    shape = ""
    try:
        with engine(run, config, **options) as core:
            if mode == "graphs" and not graphs_captured(core):
                yield dict(name=name, shape="", status="refused", why="the steps could not be captured: see the log")
                return
            for rows, context in shapes:
                shape = f"{rows} x {context}"
                why = "no time left" if run.seconds_left < 5 else _misfit(core, work, rows, context)
                if why is not None:
                    yield dict(name=name, shape=shape, status="left out", why=why)
                    continue
                row = dict(name=name, shape=shape) | _decode_row(run, core, work, rows, context)
                if large is not None and mode == "graphs":
                    row["target"] = _TARGETS[rows] if large else _SMALL_MODEL_TARGET
                    row["passed"] = row["ratio"] <= row["target"]
                yield row
    except Exception as error:  # a model or a mode that fails does not take the others along
        traceback.print_exc()
        yield refused(error, name, shape)


def prefill(run: Run) -> Iterator[dict[str, Any]]:
    """Stage `prefill`."""
    config, work = llama_8b(run), Work(llama_8b(run), 4 if run.tiny else 2)
    lengths = (16, 40) if run.tiny else (2048, 8192, 32768)
    name, rate = f"prefill {words(config)}", gpu_rates.measured(run)["gemm"]
    options: dict[str, Any] = dict(max_model_len=lengths[-1] + 16, max_num_batched_tokens=lengths[-1], max_num_seqs=1)
    try:
        with engine(run, config, **options) as core:
            for tokens in lengths:
                out = prefill_step(core, tokens)
                run_steps(core, [out])
                spent = statistics.median(run_steps(core, [out]) for _ in range(3))
                flops = work.prefill_flops(tokens)
                row: dict[str, Any] = dict(name=name, shape=f"{tokens} tokens", microseconds=spent * 1e6,
                                           achieved=flops / spent, limit=rate,
                                           ratio=flops / spent / rate, unit="FLOP/s")  # fmt: skip
                if tokens == 8192:
                    row |= dict(target=_PREFILL_TARGET, passed=row["ratio"] >= _PREFILL_TARGET)
                yield row
    except torch.OutOfMemoryError as error:
        yield refused(error, name, f"{lengths[-1]} tokens")
