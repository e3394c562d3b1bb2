"""Engines on an emulated card whose kernels are functions of torch (`card_kernels`).

All else is as on a GPU: loading, memory, streams, pinned buffers, graphs, swaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import card_kernels
import pytest
import torch
from card_kernels import CardAttention, CardOps, CardSampling
from emulated_card import Card, emulated_card
from offline import make_core

from inflight.engine.core import EngineCore
from inflight.kernels.gpu import gpu_step_inputs
from inflight.loading import loader
from inflight.loading.forward import device_adapters
from inflight.loading.forward.acceleration import use_ops
from inflight.ops.base import FusedOps
from inflight.ops.lora import ReferenceLora
from inflight.runner import base_runner
from inflight.runner.device_runner import DeviceRunner
from inflight.runner.step_inputs import StepSize

__all__ = [
    "card",
    "card_core",
    "functions_as_kernels",
    "fused_by",
    "never_waiting",
    "num_replays",
    "runner_of",
    "without_waits",
]


@pytest.fixture
def card() -> Iterator[Card]:
    """An emulated card for each test."""
    with emulated_card() as made:
        yield made


def fused_by(ops: FusedOps) -> Callable[..., Any]:
    """A replacement for `accelerate`: the model as on a GPU, by `ops`."""
    return lambda model, device, passes, length, scheme, kernels: use_ops(model, ops, passes, length)


def functions_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are loaded from now on have no kernels of the Triton language."""
    monkeypatch.setattr(loader, "accelerate", fused_by(CardOps()))
    monkeypatch.setattr(loader, "select_attention", lambda *args: CardAttention())
    monkeypatch.setattr(device_adapters, "select_lora", lambda device: ReferenceLora())
    monkeypatch.setattr(base_runner, "select_sampling", lambda device: CardSampling())
    monkeypatch.setattr(gpu_step_inputs, "make_inputs", card_kernels.make_inputs)
    monkeypatch.setattr(gpu_step_inputs, "put_tokens", card_kernels.put_tokens)


def card_core(path: str, **options: Any) -> EngineCore:
    """An engine on the card that launches ahead; the tests check it, and not the check at load."""
    limits = dict(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=64)
    return make_core(path, **{"device": "cuda", "async_scheduling": True, "check_on_load": False, **limits, **options})


def runner_of(core: EngineCore) -> DeviceRunner:
    assert isinstance(core.runner, DeviceRunner)
    return core.runner


def num_replays(core: EngineCore) -> dict[StepSize, int]:
    """Bucket -> how often its graph was replayed."""
    graphs: dict[Any, Any] = runner_of(core).graphs._graphs  # keys: `DeviceStep.graph_key`; graphs of the emulated card
    return {key[0]: graph.graph.num_replays for key, graph in graphs.items()}


def without_waits(core: EngineCore) -> EngineCore:
    """From now on a launch that waits for the card raises."""
    core.runner.launch = never_waiting(core.runner.launch)  # type: ignore[method-assign]
    return core


def never_waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises where it waits for the card."""

    def strict(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return strict
