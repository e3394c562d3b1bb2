"""The bytes of KV blocks in a GPU's pool, through pinned buffers of an extent each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from queue import LifoQueue

import numpy as np
import torch
from torch import Tensor

from inflight.device.device_queue import queue_of
from inflight.engine.tiers.base import Read
from inflight.engine.tiers.tiers import blocks_of_extent
from inflight.loading.paged_layers import PagedLayers
from inflight.runner.block_io import block_rows

__all__ = ["StagedBlocks"]

_INDEX_BYTES = 8
_UNITS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # of a copy within the device, the widest first


@dataclass(eq=False)
class _Buffer:
    """Room for an extent, of one thread at a time: int64 [blocks], and the bytes of these blocks.

    Attributes:
        host: uint8, pinned.
        device: of the same size.
        stream: beside that of the steps.
        through: behind the last work of `stream`; who waits for it sleeps, since steps need the cores to be launched.
        parts: number of blocks -> see `StagedBlocks._parts`.
    """

    host: Tensor
    device: Tensor
    stream: torch.cuda.Stream = field(default_factory=lambda: torch.cuda.Stream())
    through: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event(blocking=True))
    parts: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=dict)


class StagedBlocks:
    """Implements `KVBlocks` for pools of a GPU.

        fill    store -> pinned buffer, verified | to the device in one copy, scattered to the layers, event
        copy    gathered from the layers, to the pinned buffer in one copy, event | to memory of its own

    Damaged bytes never reach the device.  On the device, nothing orders these copies and the steps.  The host
    does, because each method waits for its event:

    - `Loads` has blocks filled that no step writes: all that were made before they were reserved are collected.  Steps
      that read them are made after `fill` has returned.
    - `TierWriter` has blocks copied that a collected step has computed.  If a step is made that could overwrite them
      before `copy` has returned, their generation has changed, and the copy is dropped.

    Args:
        layers: their pool may be allocated later; the first call comes after the load.
        num_buffers: as many calls as are made at the same time, so that one whose store hangs holds up no other.
    """

    def __init__(self, layers: PagedLayers, num_buffers: int) -> None:
        self._layers = layers
        sizes = [rows.shape[1] for rows in block_rows(layers.caches)]
        self.bytes_per_block = sum(sizes)
        self._starts = list(accumulate(sizes, initial=0))  # of each pool's part, per block
        self._unit = next(unit for unit in _UNITS if not any(size % unit.itemsize for size in sizes))
        self._most_blocks = blocks_of_extent(self.bytes_per_block, on_cores=False)
        num_bytes = self._most_blocks * (_INDEX_BYTES + self.bytes_per_block)
        device = layers.caches[0].key.device
        make = queue_of(device).host_buffer
        self._free: LifoQueue[_Buffer] = LifoQueue()
        for _ in range(num_buffers):
            self._free.put(_Buffer(make(num_bytes), torch.empty(num_bytes, dtype=torch.uint8, device=device)))

    def fill(self, blocks: Sequence[int], read: Read) -> bool:
        """See `KVBlocks`; all blocks are one buffer."""
        with self._buffer(blocks) as (buffer, payload, size):
            if not read([payload.data]):
                return False
            with _launches(buffer):
                buffer.device[:size].copy_(buffer.host[:size], non_blocking=True)
                for pool, part, indices in self._parts(buffer, len(blocks)):
                    pool.index_copy_(0, indices, part)
        return True

    def copy(self, blocks: Sequence[int]) -> memoryview:
        with self._buffer(blocks) as (buffer, payload, size):
            start = size - payload.nbytes
            with _launches(buffer):
                buffer.device[:start].copy_(buffer.host[:start], non_blocking=True)
                for pool, part, indices in self._parts(buffer, len(blocks)):
                    torch.index_select(pool, 0, indices, out=part)
                buffer.host[start:size].copy_(buffer.device[start:size], non_blocking=True)
            return payload.copy().data

    def map_pages(self) -> None:
        """A GPU's memory is there."""

    @contextmanager
    def _buffer(self, blocks: Sequence[int]) -> Iterator[tuple[_Buffer, np.ndarray, int]]:
        """A buffer that begins with the indices of `blocks`; where their bytes are, on the host; where these end."""
        assert len(blocks) <= self._most_blocks
        buffer = self._free.get()
        try:
            host, start = buffer.host.numpy(), len(blocks) * _INDEX_BYTES
            host[:start].view(np.int64)[:] = blocks
            size = start + len(blocks) * self.bytes_per_block
            yield buffer, host[start:size], size
        finally:
            self._free.put(buffer)

    def _parts(self, buffer: _Buffer, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Each layer's pool [num_blocks, N], its part of the buffer [count, N], and the indices of the blocks.

        Made once: these views would take as long as the launches, and the interpreter's lock all the time.
        """
        if count not in buffer.parts:
            payload = buffer.device[count * _INDEX_BYTES :]
            indices = buffer.device[: count * _INDEX_BYTES].view(torch.int64)
            places = zip(self._pools, self._starts, self._starts[1:])
            buffer.parts[count] = [
                (pool, payload[count * start : count * end].view(self._unit).view(count, -1), indices)
                for pool, start, end in places
            ]
        return buffer.parts[count]

    @cached_property
    def _pools(self) -> list[Tensor]:
        torch.cuda.synchronize()  # once: what the load did with this memory, and with the buffers', is done
        return [rows.view(self._unit) for rows in block_rows(self._layers.caches)]


@contextmanager
def _launches(buffer: _Buffer) -> Iterator[None]:
    """Launch on the buffer's stream, and wait for it: until then neither buffer nor blocks are another's."""
    with torch.inference_mode(), torch.cuda.stream(buffer.stream):
        try:
            yield
        finally:
            buffer.through.record()
            buffer.through.synchronize()
