"""Runs prompts of token ids through the in-process engine core, checking its invariants after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight.config import EngineConfig
from inflight.device.device_queue import DeviceQueue
from inflight.engine import assembly
from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.engine.deltas import SequenceDelta
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.runner.device_runner import DeviceRunner
from inflight.runner.pipeline import make_runner


def make_config(path: str, **options: Any) -> EngineConfig:
    options = {
        "model": path,
        "dtype": "float32",
        "device": "cpu",
        "kv_cache_memory": "4MiB",  # each step of a test looks at every block
        "admission": "free_blocks",  # lets tests with a small pool preempt
        **options,
    }
    return EngineConfig.from_dict(options)


def make_core(path: str, **options: Any) -> EngineCore:
    config = make_config(path, **options)
    return assembly.make_core(config, make_runner(config))


def make_device_core(path: str, queue: DeviceQueue | None = None, **options: Any) -> EngineCore:
    """An engine with the runner of a GPU over CPU tensors; launches ahead unless configured otherwise."""
    config = make_config(path, **{"async_scheduling": True, **options})
    return assembly.make_core(config, DeviceRunner(config, queue=queue))


def run(
    core: EngineCore,
    prompts: list[list[int]],
    params: list[SamplingParams],
    stagger: int = 0,
    attached: Sequence[Attached | None] = (),
) -> dict[tuple[int, int], list[SequenceDelta]]:
    """All deltas of each sequence (request, index); request k is added after `k * stagger` steps.

    Args:
        attached: of each request; empty: none has any.
    """
    deltas: dict[tuple[int, int], list[SequenceDelta]] = {}
    waiting = list(enumerate(zip(prompts, params)))
    steps = 0
    while waiting or core.has_work:
        while waiting and waiting[0][0] * stagger <= steps:
            request_id, (prompt, sampling) = waiting.pop(0)
            own = attached[request_id] if attached else None
            failure = core.add_request(AddRequest(request_id, prompt, sampling, attached=own))
            assert failure is None, failure
        message = core.step()
        assert not message.failed, message.failed
        for delta in message.deltas:
            deltas.setdefault((delta.request_id, delta.index), []).append(delta)
        check_core(core)
        steps += 1
    return deltas


def tokens(deltas: list[SequenceDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
