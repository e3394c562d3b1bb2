"""The engine end to end, in-process, on random weights: stages `serve` and `arrivals`."""

from __future__ import annotations

import gc
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any

import common
import numpy as np
import torch
from gpu_gemms import gemm_seconds
from gpu_model import engine, graphs_captured, llama_8b, qwen3_06b, random_model, refused, words
from gpu_rows import Run
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from inflight.engine.core import EngineCore

__all__ = ["Request", "arrivals", "itl_gaps", "run_ours", "serve"]

_PEER_TARGET = 3.0  # tokens/s over those of transformers' continuous batching
_ITL_TARGET = 3.0  # p99 with long prompts over p99 without


@dataclass(frozen=True, order=True)
class Request:
    """A request of an open-loop load.

    Attributes:
        at: arrival, in seconds after the start.
        watched: whether the gaps between its tokens count.
    """

    at: float
    prompt: list[int] = field(compare=False)
    output: int = field(compare=False)
    watched: bool = field(compare=False, default=True)


def _uniform(vocab_size: int, count: int, lengths: tuple[int, int], seed: int) -> list[Request]:
    """Requests that all arrive at once, with prompt and output lengths between the two of `lengths`."""
    rng = np.random.default_rng(seed)
    return [
        Request(0.0, rng.integers(3, vocab_size, rng.integers(*lengths, endpoint=True)).tolist(),
                int(rng.integers(*lengths, endpoint=True)))
        for _ in range(count)
    ]  # fmt: skip


def run_ours(core: EngineCore, work: list[Request]) -> float:
    """Seconds until all outputs are complete.

    Raises:
        RuntimeError: a request got another number of tokens than it asked for.
    """
    requests = [{"id": number, "prompt": each.prompt, "out": each.output} for number, each in enumerate(work)]
    run = common.timed(lambda: common.generate(core, requests))
    _require(run["tokens"], work)
    return run["seconds"]


def _require(count: int, work: list[Request]) -> None:
    if count != sum(request.output for request in work):
        raise RuntimeError(f"{count} tokens of {sum(request.output for request in work)}")


# -------------------------------------------------------------------------------------------------------- serve


@contextmanager
def _peer_manager(model: Any, run: Run, work: list[Request]) -> Iterator[Any]:
    """The manager that underlies transformers' `generate_batch`, warmed up; it takes a length per request.

    Page size, tokens per step, attention, graphs and memory are its own choice, except in a toy.
    """
    settings: dict[str, Any] = dict(max_requests_per_batch=len(work), allow_block_sharing=False)
    if run.tiny:
        page = "page_size" if "page_size" in {f.name for f in fields(ContinuousBatchingConfig)} else "block_size"
        settings |= {page: 16, "num_blocks": 64, "max_batch_tokens": 64}
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=max(r.output for r in work))
    config = ContinuousBatchingConfig(**settings)
    with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
        yield manager


class OutOfTime(RuntimeError):
    """A side of a comparison was stopped at the stage's deadline."""


def _run_peer(model: Any, run: Run, work: list[Request]) -> tuple[float, str]:
    """Seconds until all outputs are complete, and which attention and graphs transformers chose.

    Raises:
        OutOfTime: see there.
        RuntimeError: a request failed, or got another number of tokens than it asked for.
    """
    count, finished = 0, 0
    with _peer_manager(model, run, work) as manager:
        begun = time.perf_counter()
        for number, request in enumerate(work):
            manager.add_request(request.prompt, request_id=str(number), max_new_tokens=request.output)
        while finished < len(work):
            if run.seconds_left < 0:
                manager.stop(hard_stop=True)
                raise OutOfTime(f"{finished} of {len(work)} requests ended in {time.perf_counter() - begun:.0f} s")
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the thread of transformers' manager ended")
            elif result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                finished, count = finished + 1, count + len(result.generated_tokens)
        spent = time.perf_counter() - begun
        graphs = getattr(manager.continuous_batching_config, "use_cuda_graph", None)
        attention = model.config._attn_implementation
        slow = "" if "flash" in attention else ", its slow one: no FlashAttention is installed"
        note = f"attention {attention}{slow}; CUDA graphs (varlen, decode) {graphs}"
    _require(count, work)
    return spent, note


def _peer_missing(run: Run) -> str | None:
    """Why transformers cannot serve here, if it cannot."""
    if run.device == "cpu" and find_spec("psutil") is None:
        return "transformers asks psutil for the memory of a CPU, and it is not installed"
    return None


def _products_alone(run: Run, config: Any, work: list[Request]) -> float:
    """Seconds of the matrix products of `work` if all of its steps were full, by cuBLAS in CUDA graphs."""
    step = 64 if run.tiny else 8192
    rows, prompts = len(work), sum(len(request.prompt) for request in work)
    sampled = max(1, step * rows // prompts)  # prompts that end in a full step of prompts
    dtype = torch.float32 if run.tiny else torch.bfloat16
    spent = gemm_seconds(config, dtype, torch.device(run.device), [(rows, rows), (step, sampled)])
    tokens = sum(request.output for request in work)
    return tokens / rows * spent[rows, rows] + prompts / step * spent[step, sampled]


def serve(run: Run) -> Iterator[dict[str, Any]]:
    """Stage `serve`: the two sides alternate on the same prompts, until the next pair does not fit the time left."""
    config = qwen3_06b(run)
    count, lengths = (4, (4, 10)) if run.tiny else (256, (100, 1024))
    work = _uniform(config.vocab_size, count, lengths, seed=0)
    warm_up = _uniform(config.vocab_size, count, (4, 8), seed=1)
    tokens = sum(request.output for request in work)
    shape = f"{words(config)}, {count} requests of {lengths[0]}..{lengths[1]} in and out"
    engine_options: dict[str, Any] = dict(max_num_seqs=count, max_model_len=2 * lengths[1] + 16)
    if run.tiny:
        engine_options |= dict(num_gpu_blocks_override=64)
    else:  # the larger part of the card is left to the peer, which takes what it finds
        engine_options |= dict(gpu_memory_utilization=0.45, max_num_batched_tokens=8192)
    dtype = torch.float32 if run.tiny else torch.bfloat16
    floor = tokens / _products_alone(run, config, work)
    yield dict(name="serve, GEMMs alone", shape=shape, achieved=floor, unit="tokens/s", note="in full steps")
    with engine(run, config, **engine_options) as core:
        run_ours(core, warm_up)
        peer = random_model(config, dtype, "sdpa", torch.device(run.device))
        for round_number in range(1 if run.tiny else 3):
            begun = time.monotonic()
            note = f"round {round_number + 1}, CUDA graphs {'on' if graphs_captured(core) else 'off'}"
            ours = tokens / run_ours(core, work)
            yield dict(name="serve, this engine", shape=shape, achieved=ours, limit=floor, ratio=ours / floor,
                       unit="tokens/s", note=f"of GEMMs alone; {note}")  # fmt: skip
            if (why := _peer_missing(run)) is not None:
                yield dict(name="serve, transformers", shape=shape, status="left out", why=why)
                return
            try:
                spent, chosen = _run_peer(peer, run, work)
            except OutOfTime as error:
                yield dict(name="serve, transformers", shape=shape, status="left out", why=f"no time left: {error}")
                return
            except Exception as error:  # whatever transformers raises costs its rows only
                traceback.print_exc()
                yield refused(error, "serve, transformers", shape)
                return
            yield dict(name="serve, transformers", shape=shape, achieved=tokens / spent, unit="tokens/s", note=chosen)
            ratio = ours * spent / tokens
            row = dict(name="serve, over transformers", shape=shape, achieved=ours, limit=tokens / spent, ratio=ratio,
                       unit="tokens/s", note=chosen)  # fmt: skip
            yield row if run.tiny else row | dict(target=_PEER_TARGET, passed=ratio >= _PEER_TARGET)
            if run.seconds_left < 1.1 * (time.monotonic() - begun):
                return
            gc.collect()


# ----------------------------------------------------------------------------------------------------- arrivals


def itl_gaps(core: EngineCore, load: list[Request]) -> list[float]:
    """Seconds between the tokens of the watched requests, which arrive by the clock whatever the engine does."""
    waiting = deque(enumerate(sorted(load)))
    watched = {number for number, request in waiting if request.watched}
    last: dict[int, float] = {}
    gaps: list[float] = []
    begun = time.perf_counter()
    while waiting or core.has_work:
        while waiting and waiting[0][1].at <= time.perf_counter() - begun:
            number, request = waiting.popleft()
            common.add(core, number, request.prompt, max_tokens=request.output)
        if not core.has_work:
            time.sleep(max(0.0, waiting[0][1].at - (time.perf_counter() - begun)))
            continue
        deltas = core.step().deltas
        now = time.perf_counter()
        for delta in deltas:
            if delta.token_ids and delta.request_id in watched:
                if delta.request_id in last:
                    gaps.append(now - last[delta.request_id])
                last[delta.request_id] = now
    return gaps


def _poisson(run: Run, vocab_size: int) -> tuple[list[Request], list[Request]]:
    """Short requests that arrive as a Poisson process, and long prompts at regular times."""
    rng = np.random.default_rng(0)
    rate, seconds, prompt, output, long = (20.0, 0.2, 6, 4, 60) if run.tiny else (6.0, 6.0, 256, 128, 12_000)
    times = np.cumsum(rng.exponential(1 / rate, int(3 * rate * seconds)))
    short = [Request(float(at), rng.integers(3, vocab_size, prompt).tolist(), output) for at in times if at < seconds]
    every = seconds / 4
    return short, [
        Request(every * (n + 0.5), rng.integers(3, vocab_size, long).tolist(), 2, watched=False) for n in range(4)
    ]


def arrivals(run: Run) -> Iterator[dict[str, Any]]:
    """Stage `arrivals`: ITL p99 of short requests, alone and beside long prompts, with and without `itl_target_ms`."""
    config = llama_8b(run)
    short, long = _poisson(run, config.vocab_size)
    longest = max(len(request.prompt) + request.output for request in long)
    common: dict[str, Any] = dict(max_num_seqs=64, max_model_len=longest + 256)
    common |= dict(num_gpu_blocks_override=64) if run.tiny else {}
    name, shape = f"ITL p99, {words(config)}", f"{len(short)} Poisson arrivals"
    beside = f"and {len(long)} prompts of {len(long[0].prompt)}"

    def p99(core: EngineCore, load: list[Request]) -> float:
        return float(np.percentile(itl_gaps(core, load), 99)) * 1e3

    with engine(run, config, **common) as core:
        itl_gaps(core, [*short[:2], *long[:1]])  # warm-up
        alone = p99(core, short)
        yield dict(name=name, shape=shape, achieved=alone, unit="ms")
        mixed = p99(core, short + long)
        yield dict(name=name, shape=f"{shape} {beside}", achieved=mixed, limit=alone, ratio=mixed / alone, unit="ms",
                   note="static budget")  # fmt: skip
    target = max(1.0, round(0.8 * _ITL_TARGET * alone, 1))
    with engine(run, config, itl_target_ms=target, **common) as core:
        itl_gaps(core, [*short[:2], *long[:1]])
        mixed = p99(core, short + long)
        ratio = mixed / alone
        row = dict(name=name, shape=f"{shape} {beside}", achieved=mixed, limit=alone, ratio=ratio, unit="ms",
                   note=f"itl_target_ms {target:g}")  # fmt: skip
        yield row if run.tiny else row | dict(target=_ITL_TARGET, passed=ratio <= _ITL_TARGET)
