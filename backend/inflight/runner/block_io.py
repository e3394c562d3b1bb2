"""The bytes of KV blocks in a CPU's pool, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from inflight.attention.base import KVCache
from inflight.engine.tiers.base import Read

__all__ = ["PoolBlocks", "block_rows"]


class PoolBlocks:
    """Implements `KVBlocks` for pools in host memory.

    Args:
        caches: of the layers; their memory must outlive this.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self._pools = [rows.numpy() for rows in block_rows(caches)]
        self.bytes_per_block = sum(pool.shape[1] for pool in self._pools)

    def fill(self, blocks: Sequence[int], read: Read) -> bool:
        """See `KVBlocks`; consecutive blocks are one buffer."""
        runs = list(_runs(blocks))
        return read([pool[start:end].reshape(-1).data for pool in self._pools for start, end in runs])

    def copy(self, blocks: Sequence[int]) -> memoryview:
        copied = np.empty(len(blocks) * self.bytes_per_block, np.uint8)
        runs, at = list(_runs(blocks)), 0
        for pool in self._pools:
            for start, end in runs:
                size = (end - start) * pool.shape[1]
                copied[at : at + size] = pool[start:end].reshape(-1)  # without the interpreter's lock
                at += size
        return copied.data


def block_rows(caches: Sequence[KVCache]) -> Iterator[Tensor]:
    """uint8 [num_blocks, bytes of a block], sharing the caches' memory.

    In every backend's `KVCache` the first dimension is the block.  Keys and values of a block are one run of bytes if
    they are views of one tensor, else two.
    """
    for cache in caches:
        is_one = cache.key.untyped_storage().data_ptr() == cache.value.untyped_storage().data_ptr()
        for part in (cache.key,) if is_one else (cache.key, cache.value):
            num_blocks, size = part.shape[0], part.stride(0)
            yield part.as_strided((num_blocks, size), (size, 1), 0).view(torch.uint8)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, end) of consecutive blocks, in the order of `blocks`."""
    start = end = blocks[0]
    for block in blocks:
        if block != end:
            yield start, end
            start = block
        end = block + 1
    yield start, end
