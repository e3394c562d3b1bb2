"""Engines on an emulated card whose kernels are functions of torch, each launched as one kernel.

They are many times faster than kernels of the Triton language in the interpreter.  All else is as on a GPU: loading,
memory, streams, pinned buffers, graphs, swaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated_card import Card, emulated_card, launch_function
from offline import make_core
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.engine.core import EngineCore
from inflight.loading import loader
from inflight.loading.forward import device_adapters
from inflight.loading.forward.acceleration import use_ops
from inflight.ops.base import FusedOps
from inflight.ops.lora import ReferenceLora
from inflight.ops.reference_ops import ReferenceOps
from inflight.runner import base_runner, step_inputs
from inflight.runner.device_runner import DeviceRunner
from inflight.runner.step_inputs import StepSize
from inflight.sampling.choose import draw
from inflight.sampling.metadata import Kind, RandomGroup
from inflight.sampling.reference_sampling import ReferenceSampling
from inflight.sampling.unusable import NO_TOKEN

__all__ = ["card", "card_core", "functions_as_kernels", "fused_by", "num_replays", "runner_of", "without_waits"]


@pytest.fixture
def card() -> Iterator[Card]:
    """An emulated card for each test."""
    with emulated_card() as made:
        yield made


class CardAttention(ReferenceAttention):
    """The reference, which reads lengths when the card comes to it, as a kernel does."""

    capturable = True

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: AttentionMetadata) -> None:
        for x, pool in ((key, cache.key), (value, cache.value)):
            launch_function(_write, x, pool, batch.slot_mapping)

    def attend(
        self, query: Tensor, cache: KVCache, batch: AttentionMetadata, spec: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        out = query.new_empty(*query.shape[:2], spec.value_head_size)
        lengths = batch.query_start_loc, batch.seq_lens, batch.block_table
        launch_function(_attend, out, query, cache.key, cache.value, *lengths, batch.block_size, spec, sinks)
        return out


def _write(x: Tensor, pool: Tensor, slot_mapping: Tensor) -> None:
    mapped = slot_mapping >= 0
    pool.flatten(0, 1).index_copy_(0, slot_mapping[mapped], x[mapped])


def _attend(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    spec: LayerSpec,
    sinks: Tensor | None,
) -> None:
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    tokens: Any = None
    batch = AttentionMetadata(
        query_start_loc, seq_lens, block_table, tokens, starts, lengths, 0, max(lengths), block_size
    )
    out.copy_(ReferenceAttention().attend(query, KVCache(key, value), batch, spec, sinks))


class CardSampling(ReferenceSampling):
    """The reference, but for the choice of tokens, which is one launch."""

    draws = True

    def choose(self, logits: Tensor, columns: Tensor, marks: bool = True, bitmask: Any = None) -> Tensor:
        assert bitmask is None
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        launch_function(_choose, out, logits, columns, marks)
        return out


def _choose(out: Tensor, logits: Tensor, columns: Tensor, marks: bool) -> None:
    """`gpu_sampler.choose`, column after column, by the code that samples on a CPU."""
    for column in columns.T.contiguous():
        row, kind, top_k = int(column[0]), int(column[6]), int(column[2])
        reals = column[3:6].view(torch.float64).view(3, 1, 1)
        keys = column[1:2].view(torch.int32).view(2, 1, 1)
        if kind == Kind.PADDING:
            continue
        if marks and not logits[row].amax().isfinite():
            out[row] = NO_TOKEN
            continue
        if kind == Kind.GREEDY:
            out[row] = logits[row].argmax()
            continue
        group = RandomGroup(
            rows=column[:1],
            start=row,
            keys=(keys[0], keys[1]),
            inverse_temperature=reals[0].float(),
            max_top_k=top_k if kind == Kind.TOP_K else 0,
            top_k=column[2:3, None],
            top_p=reals[1] if reals[1] < 1 else None,
            min_p=reals[2].float() if reals[2] > 0 else None,
        )
        (out[row],), _ = draw(logits.float(), group)


def fused_by(ops: FusedOps) -> Callable[..., Any]:
    """A replacement for `accelerate`: the model as on a GPU, by `ops`."""
    return lambda model, device, passes, length, scheme, kernels: use_ops(model, ops, passes, length)


def functions_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are loaded from now on have no kernels of the Triton language."""
    monkeypatch.setattr(loader, "accelerate", fused_by(ReferenceOps()))
    monkeypatch.setattr(loader, "select_attention", lambda *args: CardAttention())
    monkeypatch.setattr(device_adapters, "select_lora", lambda device: ReferenceLora())
    monkeypatch.setattr(base_runner, "select_sampling", lambda device: CardSampling())
    monkeypatch.setattr(step_inputs, "can_launch", lambda device: False)


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
    launch: Callable[[Any], Any] = core.runner.launch

    def strict(out: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(out)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    core.runner.launch = strict  # type: ignore[method-assign]
    return core
