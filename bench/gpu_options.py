"""Stage `options`: tokens/s of the engine with one switch on, over those with all off."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
from gpu_engine import Request, run_ours
from gpu_model import engine, gpt_oss, llama_8b, refused
from gpu_rows import Run

from inflight.config import EngineConfig

__all__ = ["LOADS", "Load", "missing", "options"]

_LAYERS = 16  # of the 8B's 32: the ratios are the same, and loading takes half as long
_SECONDS = 10  # for one engine: load, capture, two runs


@dataclass(frozen=True)
class Load:
    """Requests that arrive at once at a model, and the switches that can matter to them.

    Attributes:
        model: a configuration of transformers.
        prompt, output: tokens of each request.
        base: options of every engine of this load.
        switches: name -> options; each is one row.
    """

    name: str
    model: Callable[[Run], Any]
    count: int
    prompt: int
    output: int
    switches: dict[str, dict[str, Any]]
    base: dict[str, Any] = field(default_factory=dict)


def _dense(run: Run) -> Any:
    config = llama_8b(run)
    config.num_hidden_layers = min(config.num_hidden_layers, _LAYERS)
    return config


def _graphs(size: int) -> Load:
    """Steps of at most `size` tokens, most of them with a part of a prompt."""
    switch = {f"graphs of {size} tokens": {"max_cudagraph_capture_size": size}}
    return Load(f"chunks of {size}", _dense, 64, 512, 128, switch, {"max_num_batched_tokens": size})


# Off is what an engine does without the switch, so launch-ahead, which "auto" turns on, is off by name.
_OFF: dict[str, Any] = {"async_scheduling": False, "max_num_batched_tokens": 8192}
LOADS = (
    Load(
        "64 requests", _dense, 64, 512, 128,
        {
            "launch-ahead": {"async_scheduling": True},
            "fp8 weights": {"quantization": "fp8"},
            "int4 weights": {"quantization": "int4"},
            "fp8 KV": {"kv_cache_dtype": "fp8"},
            "2,048 tokens a step": {"max_num_batched_tokens": 2048},
        },
    ),
    _graphs(512),
    _graphs(1024),
    Load(
        "16 requests", _dense, 16, 128, 128,
        {
            "launch-ahead": {"async_scheduling": True},
            "split_k": {"kernel_config": {"split_k": True}},
            "launch_pdl": {"kernel_config": {"launch_pdl": True}},
        },
    ),
    Load("prompts", _dense, 8, 4096, 2, {"varlen_attention": {"kernel_config": {"varlen_attention": True}}}),
    Load("experts", gpt_oss, 64, 128, 64, {"fused_experts": {"kernel_config": {"fused_experts": True}}}),
)  # fmt: skip


def missing(values: dict[str, Any], struct: type[msgspec.Struct] = EngineConfig) -> str | None:
    """The first option that this version of the engine does not have, such as "kernel_config.split_k"."""
    types = get_type_hints(struct)
    for key, value in values.items():
        if key not in types:
            return key
        for inner in (types[key], *get_args(types[key])):
            if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                absent = missing(value, inner)
                if absent is not None:
                    return f"{key}.{absent}"
    return None


def options(run: Run) -> Iterator[dict[str, Any]]:
    """A row for each switch of each load, after one with all off."""
    for load in LOADS:
        count, prompt, output = (3, 6, 4) if run.tiny else (load.count, load.prompt, load.output)
        shape = f"{load.name}: {count} x {prompt} in, {output} out"
        off, usual = None, set[str]()
        for name, switch in {"off": {}, **load.switches}.items():
            row: dict[str, Any] = dict(name=f"option: {name}", shape=shape)
            absent = missing(switch)
            if absent is not None:
                yield row | dict(status="not built", why=f"this version of the engine has no option {absent}")
            elif run.seconds_left < (1 if run.tiny else _SECONDS):
                yield row | dict(status="left out", why="no time left")
            else:
                with _warnings() as warned:
                    row |= _measured(run, load, count, prompt, output, switch)
                if name == "off":
                    usual = set(warned)
                elif "achieved" in row and (new := [text for text in warned if text not in usual]):
                    yield row | dict(
                        status="refused", why="; ".join(new)
                    )  # not, or not everywhere, what was to be timed
                    continue
                rate = row.get("achieved")
                off = rate if name == "off" else off
                yield row | (dict(limit=off, ratio=rate / off) if rate and off else {})


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """The engine's warnings, with which it runs on without a kernel or a graph that cannot be used."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, log = Collect(logging.WARNING), logging.getLogger("inflight")
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


def _measured(run: Run, load: Load, count: int, prompt: int, output: int, switch: dict[str, Any]) -> dict[str, Any]:
    """Tokens in and out per second, or why there is no such engine here."""
    values = _OFF | load.base | dict(max_num_seqs=count, max_model_len=prompt + output) | switch
    if run.tiny:
        values |= dict(num_gpu_blocks_override=64)
    config, rng = load.model(run), np.random.default_rng(0)
    work = [Request(0.0, rng.integers(3, config.vocab_size, prompt).tolist(), output) for _ in range(count)]
    try:
        with engine(run, config, **values) as core:
            run_ours(core, [Request(0.0, request.prompt, 2) for request in work])
            return dict(achieved=count * (prompt + output) / run_ours(core, work), unit="tokens/s")
    except Exception as error:  # a switch that fails does not take the others along
        traceback.print_exc()
        refusal = refused(error, "", "")
        return dict(status=refusal["status"], why=refusal["why"])
