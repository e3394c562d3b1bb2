"""A simulated card for engines with decode graphs: CPU tensors, and kernels that a capture can contain."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_graph import FakeCapturer, kernel
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.config import EngineConfig
from inflight.engine.assembly import make_core
from inflight.engine.core import EngineCore
from inflight.loading import loader
from inflight.loading.forward.acceleration import use_ops
from inflight.ops.base import FusedOps
from inflight.ops.reference_ops import ReferenceOps
from inflight.runner import base_runner as base
from inflight.runner import graphs
from inflight.runner.device_runner import DeviceRunner
from inflight.sampling import sampler
from inflight.sampling.choose import draw
from inflight.sampling.metadata import Kind, RandomGroup
from inflight.sampling.reference_sampling import ReferenceSampling
from inflight.sampling.unusable import NO_TOKEN


class DeviceAttention(ReferenceAttention):
    """The reference, which reads lengths when it runs, as a kernel does, not when it is launched."""

    capturable = True

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: AttentionMetadata) -> None:
        for x, pool in ((key, cache.key), (value, cache.value)):
            _write(x, pool, batch.slot_mapping)

    def attend(
        self, query: Tensor, cache: KVCache, batch: AttentionMetadata, spec: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        lengths = batch.query_start_loc, batch.seq_lens, batch.block_table
        return _attend(query, cache.key, cache.value, *lengths, batch.block_size, spec, sinks)


@kernel
def _write(x: Tensor, pool: Tensor, slot_mapping: Tensor) -> None:
    mapped = slot_mapping >= 0
    pool.flatten(0, 1).index_copy_(0, slot_mapping[mapped], x[mapped])


@kernel
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    spec: LayerSpec,
    sinks: Tensor | None,
) -> Tensor:
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    tokens: Any = None
    batch = AttentionMetadata(
        query_start_loc, seq_lens, block_table, tokens, starts, lengths, 0, max(lengths), block_size
    )
    return ReferenceAttention().attend(query, KVCache(key, value), batch, spec, sinks)


@kernel
def choose(logits: Tensor, columns: Tensor, out: Tensor | None = None, marks: bool = True) -> Tensor:
    """`gpu_sampler.choose`, column after column, by the code that samples on a CPU."""
    out = torch.empty(len(logits), dtype=torch.int64) if out is None else out
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
    return out


class ChosenBy(ReferenceSampling):
    """The reference, but for a kernel that chooses tokens."""

    draws = True

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        self._kernel = kernel

    def choose(self, logits: Tensor, columns: Tensor, marks: bool = True, bitmask: Any = None) -> Tensor:
        assert bitmask is None
        return self._kernel(logits, columns, marks=marks)


def fused_by(ops: FusedOps) -> Callable[..., Any]:
    """A replacement for `accelerate`: the model as on a GPU, by `ops`."""
    return lambda model, device, passes, length, scheme, kernels: use_ops(model, ops, passes, length)


def pretend_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines load as on a GPU with unlimited memory, and capture their decode steps."""
    meter = SimpleNamespace(total=2**40, used=lambda: 0, peak_of=lambda run: 0 * len([run()]))
    monkeypatch.setattr(loader, "meter_of", lambda device: meter)
    pretend_kernels(monkeypatch)


def pretend_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "accelerate", fused_by(ReferenceOps()))
    monkeypatch.setattr(loader, "select_attention", lambda *args: DeviceAttention())
    monkeypatch.setattr(graphs, "capturer_of", lambda device: FakeCapturer())
    monkeypatch.setattr(base, "select_sampling", lambda device: ChosenBy(choose))
    # As on a GPU: on a CPU the host checks whether there is anything to mark.
    monkeypatch.setattr(sampler, "mark_unusable", lambda ids, tops: torch.where(tops.isfinite(), ids, NO_TOKEN))


def graph_core(path: str, **options: Any) -> EngineCore:
    """An engine on a `DeviceRunner` in float32; `enforce_eager: true` is the engine to compare it with."""
    values = dict(model=path, dtype="float32", device="cpu", admission="free_blocks", num_gpu_blocks_override=128)
    config = EngineConfig.from_dict(values | options)
    return make_core(config, DeviceRunner(config))


def captured_by(core: EngineCore) -> FakeCapturer:
    assert isinstance(core.runner, DeviceRunner)
    capturer = core.runner.graphs._capturer
    assert isinstance(capturer, FakeCapturer)
    return capturer
