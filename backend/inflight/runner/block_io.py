"""The bytes of KV blocks in a CPU's pool, layer by layer."""

from __future__ import annotations

import platform
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from ctypes import c_int32

import numpy as np
import torch
from torch import Tensor

from inflight.attention.base import KVCache
from inflight.engine.tiers.base import Read
from inflight.kernels.cpu import library

__all__ = ["PoolBlocks", "block_rows"]

# From this Linux on, a page fault does not keep other threads from allocating memory, however long it takes.
_FAULTS_APART = 6, 4


class PoolBlocks:
    """Implements `KVBlocks` for pools in host memory.

    Args:
        caches: of the layers; their memory must outlive this.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self._pools = [rows.numpy() for rows in block_rows(caches)]
        self.bytes_per_block = sum(pool.shape[1] for pool in self._pools)
        self._stop = c_int32(0)
        self._maps_pages = library.unavailable() is None and _linux() >= _FAULTS_APART
        weakref.finalize(self, setattr, self._stop, "value", 1)

    def map_pages(self) -> None:
        """See `KVBlocks`.  On a virtual machine a read into new memory can take ten times as long as one into old."""
        if self._maps_pages:
            self._maps_pages = False
            threading.Thread(target=_map_pages, args=(self._pools, self._stop), name="kv-pages", daemon=True).start()

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


def _map_pages(pools: Sequence[np.ndarray], stop: c_int32) -> None:
    """Keeps the memory while its thread writes there."""
    library.map_pages([pool.ctypes.data for pool in pools], [pool.nbytes for pool in pools], stop)


def _linux() -> tuple[int, ...]:
    """Version of the running kernel; (0, 0) elsewhere."""
    found = re.match(r"(\d+)\.(\d+)", platform.release()) if platform.system() == "Linux" else None
    return tuple(map(int, found.groups())) if found else (0, 0)


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
