"""Decode steps and prefills of a runner, driven by schedules made here: stages `decode` and `prefill`.

The KV of a decode's context is taken as computed, which saves the prefill of half a million tokens; its values
do not change the time of a step.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import gpu_rates
import numpy as np
import torch
from gpu_gemms import gemm_seconds
from gpu_model import Work, engine, graphs_captured, llama_8b, qwen3_06b, refused, words
from gpu_profile import profiled, shares
from gpu_rows import Run

from inflight.engine.core import EngineCore
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput

__all__ = ["decode", "decode_steps", "prefill", "prefill_step"]

_STEPS = 100  # per batch, at most
_WARM_UP, _PROFILED = 4, 5
# Rows of the batch -> the most that a step may take over its floor (H200, bfloat16).
_TARGETS = {1: 1.3, 16: 1.3, 64: 1.3, 256: 1.4}
_SMALL_MODEL_TARGETS = {64: 1.5}
_INT4_TARGETS = {1: 1.6}
_INT4_BYTES = 4.5 / 8  # of a weight that is quantised at load
# From so many rows on, matrix products take longer than reading the weights: their own time and that of reading the
# KV are the floor.  Below, reading the weights and the KV once is.
_JUDGED_BY_PARTS = 256
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
    in_flight = 2 if core.config.launches_ahead else 1
    tickets: deque[Any] = deque()
    begun = time.perf_counter()
    for out in outs:
        tickets.append(core.runner.launch(out))
        if len(tickets) == in_flight:
            core.runner.collect(tickets.popleft())
    while tickets:
        core.runner.collect(tickets.popleft())
    return (time.perf_counter() - begun) / len(outs)


def _decode_row(run: Run, core: EngineCore, work: Work, rows: int, context: int, gemms: float) -> dict[str, Any]:
    """Time of a step over its floors; launches, dearest kernels and idle share of the GPU.

    Args:
        gemms: seconds of the step's matrix products alone.
    """
    rates = gpu_rates.measured(run)
    steps = 3 if run.tiny else _STEPS
    outs = decode_steps(core, rows, context, _WARM_UP + steps + _PROFILED)
    run_steps(core, outs[:_WARM_UP])
    spent = run_steps(core, outs[_WARM_UP : _WARM_UP + steps])
    middle = context + _WARM_UP + steps // 2
    by_bytes = work.decode_bytes(rows, middle) / rates["read"]
    by_parts = gemms + rows * middle * work.kv_bytes / rates["read"]
    roofline = max(by_bytes, work.decode_flops(rows, middle) / rates["gemm"])
    floor = by_parts if rows >= _JUDGED_BY_PARTS else by_bytes
    row = dict(achieved=spent * 1e3, limit=floor * 1e3, ratio=spent / floor, unit="ms", over_bytes=spent / by_bytes,
               over_parts=spent / by_parts, over_roofline=spent / roofline, tokens_per_second=rows / spent)  # fmt: skip
    if run.device == "cuda" and (share := shares(profiled(lambda: run_steps(core, outs[-_PROFILED:])), _PROFILED)):
        idle = max(0.0, 1 - share["busy"] / spent)
        row |= dict(launches=share["launches"], gpu_idle=idle, kernels=share["kernels"])
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
        shapes = [(2, 20)]
    # Before any engine, which takes what memory there is.
    sides = [(large, shapes, _TARGETS), (small, shapes[:1] if run.tiny else [(64, 1024)], _SMALL_MODEL_TARGETS)]
    gemms = []
    for config, batches, _ in sides:
        gemms.append(_gemms(run, config, sorted({rows for rows, _ in batches})))
        yield from _gemm_rows(run, config, gemms[-1])
    for mode in ("graphs", "eager"):
        if mode == "graphs" and run.device == "cpu":
            yield dict(name="decode, graphs", shape="", status="left out", why="a CPU captures no CUDA graphs")
            continue
        for (config, batches, targets), spent in zip(sides, gemms):
            yield from _decode_rows(run, config, batches, mode, spent, {} if run.tiny else targets)
    batches = shapes if run.tiny else [(rows, 1024) for rows in (1, 16, 64)]
    mode = "eager" if run.device == "cpu" else "graphs"
    yield from _decode_rows(run, large, batches, mode, gemms[0], {} if run.tiny else _INT4_TARGETS, "int4")


def _gemms(run: Run, config: Any, batches: Sequence[int]) -> dict[int, float]:
    """Rows of a decode step -> seconds of its matrix products alone."""
    dtype = torch.float32 if run.tiny else torch.bfloat16
    found = gemm_seconds(config, dtype, torch.device(run.device), [(rows, rows) for rows in batches])
    return {rows: spent for (rows, _), spent in found.items()}


def _gemm_rows(run: Run, config: Any, gemms: dict[int, float]) -> Iterator[dict[str, Any]]:
    work, rate = Work(config, 4 if run.tiny else 2), gpu_rates.measured(run)["read"]
    for rows, spent in gemms.items():
        floor = work.weights * work.itemsize / rate
        yield dict(name=f"decode {words(config)}, GEMMs alone", shape=f"{rows} rows", achieved=spent * 1e3,
                   limit=floor * 1e3, ratio=spent / floor, unit="ms", note="over reading the weights once")  # fmt: skip


def _decode_rows(
    run: Run,
    config: Any,
    shapes: list[tuple[int, int]],
    mode: str,
    gemms: dict[int, float],
    targets: dict[int, float],
    quantization: str | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of one model; `targets` are by rows of the batch, and only for graphs.

    Args:
        gemms: of plain weights.
        quantization: "int4", or None.
    """
    stored = "" if quantization is None else f", {quantization}"
    name = f"decode {words(config)}{stored}, {mode}"
    work = Work(config, 4 if run.tiny else 2, None if quantization is None else _INT4_BYTES)
    longest = max(context for _, context in shapes) + _STEPS + _WARM_UP + _PROFILED
    options: dict[str, Any] = dict(
        max_num_seqs=max(rows for rows, _ in shapes), max_model_len=longest, enforce_eager=mode == "eager"
    )
    if quantization is not None:
        options["quantization"] = quantization
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
                row: dict[str, Any] = dict(name=name, shape=shape) | _decode_row(
                    run, core, work, rows, context, gemms[rows]
                )
                if rows in targets and mode == "graphs":
                    row |= dict(target=targets[rows], passed=row["ratio"] <= targets[rows])
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
                ratio = flops / spent / rate
                row = dict(name=name, shape=f"{tokens} tokens", microseconds=spent * 1e6, achieved=flops / spent,
                           limit=rate, ratio=ratio, unit="FLOP/s")  # fmt: skip
                if tokens == 8192:
                    row |= dict(target=_PREFILL_TARGET, passed=ratio >= _PREFILL_TARGET)
                yield row
    except torch.OutOfMemoryError as error:
        yield refused(error, name, f"{lengths[-1]} tokens")
