"""Copies of KV blocks between the device's pool and host memory, for requests preempted by swapping.

In every backend's `KVCache` the first dimension is the block: a block is one index into each of a layer's two
tensors, whatever their layout.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from inflight.attention.base import KVCache
from inflight.device.memory import pin
from inflight.engine.step import SchedulerOutput

__all__ = ["HostCache", "StagedHostCache", "host_cache_of"]

_MEASURED_BLOCKS = 64  # a few MiB to a few hundred MiB
_MEASURED_ROUNDS = 3
_STAGED_BLOCKS = 64  # of one tensor: a few MiB on the device


class HostCache:
    """Host memory for KV blocks: one tensor for each of the device's.

    Args:
        caches: the layers' KV caches, tensors [num_blocks, ...].
        num_blocks: blocks on the host.
    """

    def __init__(self, caches: Sequence[KVCache], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        pools = chain.from_iterable((cache.key, cache.value) for cache in caches)
        # Not every device supports gathering fp8, but every one supports bytes.
        self._device = [pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool for pool in pools]
        self._host = [torch.empty(num_blocks, *pool.shape[1:], dtype=pool.dtype) for pool in self._device]

    def swap(self, out: SchedulerOutput) -> None:
        """Make a step's copies, out before in: one step can free a block and give it to a request that returns."""
        if out.swap_out:
            self.swap_out(out.swap_out)
        if out.swap_in:
            self.swap_in(out.swap_in)

    def swap_out(self, copies: dict[int, int]) -> None:
        """Copy blocks to the host; `copies` is host block -> block.  The blocks may be overwritten afterwards."""
        self._copy(self._device, self._host, list(copies.values()), list(copies))

    def swap_in(self, copies: dict[int, int]) -> None:
        """Copy blocks back; `copies` is block -> host block.  The host blocks may be overwritten afterwards."""
        self._copy(self._host, self._device, list(copies.values()), list(copies))

    @torch.inference_mode()
    def _copy(self, source: list[Tensor], target: list[Tensor], from_blocks: list[int], to_blocks: list[int]) -> None:
        """Gather on the source's side, scatter on the target's side, one tensor at a time."""
        take, put = torch.tensor(from_blocks), torch.tensor(to_blocks)
        for old, new in zip(source, target):
            new.index_copy_(0, put, old.index_select(0, take))

    def seconds_per_block(self) -> float:
        """Measured time to copy one block to the host and back, the best of three rounds.

        The contents of the pool do not change.
        """
        count = min(_MEASURED_BLOCKS, self.num_blocks, len(self._device[0]))
        copies = {block: block for block in range(count)}
        best = float("inf")
        for _ in range(_MEASURED_ROUNDS):
            start = time.perf_counter()
            self.swap_out(copies)
            self.swap_in(copies)
            if self._device[0].is_cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best / count


class StagedHostCache(HostCache):
    """The same for a GPU, in pinned memory: the host starts the copies and waits for none of them.

    Blocks pass through a buffer on the device, where they are gathered and scattered; each run of consecutive host
    blocks is one copy.  All of it is on the current stream, which also runs the steps: a block is copied before
    a later step overwrites it, and is back before its step reads it.  Nothing on the host reads or writes the
    pinned memory.  Nothing large is allocated, so a swap does not run out of memory.
    """

    def __init__(self, caches: Sequence[KVCache], num_blocks: int) -> None:
        super().__init__(caches, num_blocks)
        for tensor in self._host:
            weakref.finalize(self, pin(tensor)).atexit = False  # the end of the process unpins, too
        size = max(pool[:1].nbytes for pool in self._device) * _STAGED_BLOCKS
        self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device[0].device)

    @torch.inference_mode()
    def swap_out(self, copies: dict[int, int]) -> None:
        for blocks, runs in self._parts(copies):
            for pool, host in zip(self._device, self._host):
                staged = self._staged(pool, len(blocks))
                torch.index_select(pool, 0, blocks, out=staged)
                for start, end, first in runs:
                    host[first : first + end - start].copy_(staged[start:end], non_blocking=True)

    @torch.inference_mode()
    def swap_in(self, copies: dict[int, int]) -> None:
        for blocks, runs in self._parts({host: block for block, host in copies.items()}):
            for pool, host in zip(self._device, self._host):
                staged = self._staged(pool, len(blocks))
                for start, end, first in runs:
                    staged[start:end].copy_(host[first : first + end - start], non_blocking=True)
                pool.index_copy_(0, blocks, staged)

    def _staged(self, pool: Tensor, count: int) -> Tensor:
        """The first `count` blocks of the buffer, in the shape of the pool's."""
        return self._buffer[: count * pool[:1].nbytes].view(pool.dtype).view(count, *pool.shape[1:])

    def _parts(self, copies: dict[int, int]) -> Iterator[tuple[Tensor, list[tuple[int, int, int]]]]:
        """`copies`, host block -> block, in parts that fit the buffer.

        Yields:
            The part's blocks, int64 on the device, and the runs [start, end) among them whose host blocks are
            consecutive, with the first of these.
        """
        host_blocks = np.sort(np.fromiter(copies, dtype=np.int64))
        for offset in range(0, len(host_blocks), _STAGED_BLOCKS):
            part = host_blocks[offset : offset + _STAGED_BLOCKS]
            blocks = torch.tensor([copies[block] for block in part.tolist()])
            if self._buffer.is_cuda:
                blocks = blocks.pin_memory().to(self._buffer.device, non_blocking=True)
            starts = np.flatnonzero(np.diff(part, prepend=-2) != 1)
            yield blocks, list(zip(starts.tolist(), [*starts[1:].tolist(), len(part)], part[starts].tolist()))


def host_cache_of(caches: Sequence[KVCache], num_blocks: int) -> HostCache:
    """The host memory for these caches' device."""
    kind = StagedHostCache if caches[0].key.is_cuda else HostCache
    return kind(caches, num_blocks)
