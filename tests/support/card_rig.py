"""Engines on an emulated card whose kernels are functions of torch, each launched as one kernel.

They are many times faster than kernels of the Triton language in the interpreter.  All else is as on a GPU: loading,
memory, streams, pinned buffers, graphs, swaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import graph_rig
import pytest
import torch
from emulated_card import Card, emulated_card, launch_function
from offline import make_core
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.engine.core import EngineCore
from inflight.loading import loader
from inflight.ops.reference_ops import ReferenceOps
from inflight.runner import base_runner, step_inputs
from inflight.runner.device_runner import DeviceRunner
from inflight.runner.step_inputs import StepSize

__all__ = ["card", "card_core", "functions_as_kernels", "num_replays", "runner_of", "without_waits"]


@pytest.fixture
def card() -> Iterator[Card]:
    """An emulated card for each test."""
    with emulated_card() as made:
        yield made


class CardAttention(ReferenceAttention):
    """The reference, which reads lengths when the card comes to it."""

    capturable = True

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: AttentionMetadata) -> None:
        for x, pool in ((key, cache.key), (value, cache.value)):
            launch_function(graph_rig._write, x, pool, batch.slot_mapping)

    def attend(
        self, query: Tensor, cache: KVCache, batch: AttentionMetadata, spec: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        out = query.new_empty(*query.shape[:2], spec.value_head_size)
        lengths = batch.query_start_loc, batch.seq_lens, batch.block_table
        arguments = query, cache.key, cache.value, *lengths, batch.block_size, spec, sinks
        launch_function(lambda out, *arguments: out.copy_(graph_rig._attend(*arguments)), out, *arguments)
        return out


def choose(logits: Tensor, columns: Tensor, out: Tensor | None = None, marks: bool = True) -> Tensor:
    """`gpu_sampler.choose`"""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device) if out is None else out
    launch_function(lambda out, *arguments: graph_rig.choose(*arguments, out, marks), out, logits, columns)
    return out


def functions_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are loaded from now on have no kernels of the Triton language."""
    monkeypatch.setattr(loader, "accelerate", graph_rig.fused_by(ReferenceOps()))
    monkeypatch.setattr(loader, "select_attention", lambda *args: CardAttention())
    monkeypatch.setattr(base_runner, "select_sampling", lambda device: graph_rig.ChosenBy(choose))
    monkeypatch.setattr(step_inputs, "can_launch", lambda device: False)


def card_core(path: str, **options: Any) -> EngineCore:
    """An engine on the card that launches ahead."""
    defaults = dict(device="cuda", async_scheduling=True, max_num_seqs=6, max_num_batched_tokens=40, max_model_len=64)
    return make_core(path, **{**defaults, **options})


def runner_of(core: EngineCore) -> DeviceRunner:
    assert isinstance(core.runner, DeviceRunner)
    return core.runner


def num_replays(core: EngineCore) -> dict[StepSize, int]:
    """Bucket -> how often its graph was replayed."""
    graphs: dict[Any, Any] = runner_of(core).graphs._graphs  # keys: `DeviceStep.graph_key`; graphs of the emulated card
    return {key[0]: graph.graph.num_replays for key, graph in graphs.items()}


def without_waits(core: EngineCore) -> EngineCore:
    """From now on a launch that waits for the card raises."""
    launch: Callable[[Any], Any] = core.runner.launch

    def strict(out: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(out)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    core.runner.launch = strict  # type: ignore[method-assign]
    return core
