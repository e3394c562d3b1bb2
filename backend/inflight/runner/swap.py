"""Copies of KV blocks between the device's pool and host memory, for requests preempted by swapping.

In every backend's `KVCache` the first dimension is the block: a block is one index into each of a layer's two
tensors, whatever their layout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from inflight.attention.base import KVCache

__all__ = ["HostCache"]

_MEASURED_BLOCKS = 64  # a few MiB to a few hundred MiB
_MEASURED_ROUNDS = 3


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

    def swap_out(self, copies: dict[int, int]) -> None:
        """Copy blocks to the host; `copies` is host block -> block.  The blocks may be overwritten afterwards."""
        self._copy(self._device, self._host, list(copies.values()), list(copies))

    def swap_in(self, copies: dict[int, int]) -> None:
        """Copy blocks back; `copies` is block -> host block.  The host blocks may be overwritten afterwards."""
        self._copy(self._host, self._device, list(copies.values()), list(copies))

    @torch.inference_mode()
    def _copy(self, source: list[Tensor], target: list[Tensor], from_blocks: list[int], to_blocks: list[int]) -> None:
        """Gather on the source's side, transfer one tensor at a time, scatter on the target's side."""
        take = torch.tensor(from_blocks, device=source[0].device)
        put = torch.tensor(to_blocks, device=target[0].device)
        for old, new in zip(source, target):
            new.index_copy_(0, put, old.index_select(0, take).to(new.device))

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
