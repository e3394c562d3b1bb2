"""The memory of an emulated card: torch's caching allocator by its figures, over memory of the host.

Contents that a program must not rely on are visibly wrong: NaN as floats, and as integers far out of range of any
index.  That is memory that was allocated and not written, or that was freed.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from emulated_card.streams import device_side

if TYPE_CHECKING:
    from emulated_card.graphs import Capture

__all__ = ["Allocation", "Allocator", "PinnedMemory", "Pool", "poison"]

_SEGMENT = 2 * 2**20  # bytes that the allocator takes from the card at once
_ROUNDING = 512  # bytes
_MIB = 2**20


def poison(storage: torch.UntypedStorage, dtype: torch.dtype) -> Callable[[], None]:
    """The work that makes all of `storage` NaN if `dtype` is a float, and 0x7f7f... if it is an integer."""
    if dtype == torch.bool:
        byte = 1
    else:
        byte = 0xFF if dtype.is_floating_point or dtype.is_complex else 0x7F

    def fill() -> None:
        ctypes.memset(storage.data_ptr(), byte, storage.nbytes())

    return fill


@dataclass(eq=False)
class Pool:
    """Memory that allocations share: the default one, or one of CUDA graphs.

    Attributes:
        users: graphs that were captured with it, or are being captured.
        leftovers: what graphs allocated and freed; the replay of another graph destroys it.
    """

    key: tuple[int, int]
    allocated: int = 0
    reserved: int = 0
    users: int = 0
    leftovers: list[tuple[Capture, Callable[[], None]]] = field(default_factory=list)


class Allocation:
    """One allocation, until nothing on the host refers to it."""

    __slots__ = ("__weakref__", "_allocator", "capture", "dtype", "pool", "size", "storage")

    def __init__(
        self,
        allocator: Allocator | None,
        pool: Pool | None,
        capture: Capture | None,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        size: int,
    ) -> None:
        self._allocator, self.pool, self.capture = allocator, pool, capture
        self.storage, self.dtype, self.size = storage, dtype, size

    def __del__(self) -> None:
        if self._allocator is not None:
            self._allocator.freed(self)


class Allocator:
    """The figures of torch's allocator, and its errors.

    Args:
        total: bytes of the card.
        launch: puts work into the current stream, or into its capture.
        drain: waits for the whole card.
    """

    def __init__(self, total: int, launch: Callable[[Callable[[], None]], None], drain: Callable[[], None]) -> None:
        self.total = total
        self.others = 0  # bytes that other processes hold
        self.driver = 0  # bytes that the driver holds for this process
        self.lock = threading.RLock()
        self.default = Pool((0, 0))
        self.pools: dict[tuple[int, int], Pool] = {}
        self.underway: list[tuple[int, int]] = []  # pools of captures that were begun and not ended
        self.peak = self.peak_allocated = self.num_ooms = 0
        self._launch, self._drain = launch, drain
        self._storages: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
        self._closed = False

    @property
    def available(self) -> int:
        """Bytes of the card that this allocator has, or can have."""
        return self.total - self.others - self.driver

    @property
    def reserved(self) -> int:
        return self.default.reserved + sum(pool.reserved for pool in self.pools.values())

    @property
    def allocated(self) -> int:
        return self.default.allocated + sum(pool.allocated for pool in self.pools.values())

    def allocate(self, num_bytes: int, dtype: torch.dtype, capture: Capture | None) -> Allocation:
        """`num_bytes` of undefined contents, for `capture` or in the default pool.

        Raises:
            torch.OutOfMemoryError: the card has not so much left.
        """
        size = -(-num_bytes // _ROUNDING) * _ROUNDING
        with self.lock:
            pool = self.default if capture is None else capture.pool
            self._reserve(pool, size)
            pool.allocated += size
            self.peak_allocated = max(self.peak_allocated, self.allocated)
        storage = torch.UntypedStorage(num_bytes)
        fill = poison(storage, dtype)
        fill()
        if capture is not None:
            self._launch(fill)
        made = Allocation(self, pool, capture, storage, dtype, size)
        self._storages[storage.data_ptr()] = made
        return made

    def bytes_at(self, address: int, size: int) -> Tensor:
        """uint8 [size] of the allocation that `address` is in."""
        for start, allocation in self._storages.items():
            if start <= address and address + size <= start + allocation.storage.nbytes():
                with device_side():
                    return torch.empty(0, dtype=torch.uint8).set_(allocation.storage, address - start, (size,), (1,))
        raise RuntimeError(f"no tensor has the {size} bytes at {address:#x}")

    def _reserve(self, pool: Pool, size: int) -> None:
        missing = pool.allocated + size - pool.reserved
        if missing <= 0:
            return
        grown = -(-missing // _SEGMENT) * _SEGMENT
        if self.reserved + grown > self.available:
            self.release_cached()
            grown = -(-max(0, pool.allocated + size - pool.reserved) // _SEGMENT) * _SEGMENT
        if self.reserved + grown > self.available:
            self.num_ooms += 1
            free = (self.available - self.reserved) / _MIB
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / _MIB:.2f} MiB. GPU 0 has a total capacity of "
                f"{self.total / _MIB:.2f} MiB; {free:.2f} MiB are free."
            )
        pool.reserved += grown
        self.peak = max(self.peak, self.reserved)

    def freed(self, allocation: Allocation) -> None:
        """Called by the allocation's end: work in the stream behind this must not use its memory any more."""
        if self._closed:
            return
        pool, capture = allocation.pool, allocation.capture
        assert pool is not None
        with self.lock:
            pool.allocated -= allocation.size
        fill = poison(allocation.storage, allocation.dtype)
        if capture is None:
            self._launch(fill)
        elif capture.is_active:
            if capture.is_valid:
                capture.record(fill)
        else:
            pool.leftovers.append((capture, fill))

    def release_cached(self) -> None:
        """`empty_cache`; does nothing while a capture is under way, or was begun and never ended."""
        if self.underway:
            return
        self._drain()
        with self.lock:
            self.default.reserved = -(-self.default.allocated // _SEGMENT) * _SEGMENT
            for pool in [pool for pool in self.pools.values() if not pool.users]:
                pool.leftovers.clear()
                pool.reserved = -(-pool.allocated // _SEGMENT) * _SEGMENT
                if not pool.reserved:
                    del self.pools[pool.key]

    def pool_of(self, key: tuple[int, int]) -> Pool:
        with self.lock:
            return self.pools.setdefault(key, Pool(key))

    def end(self, key: tuple[int, int]) -> None:
        """No capture allocates from the pool any more."""
        if key not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(key)

    def leave(self, key: tuple[int, int]) -> None:
        """One user of the pool less."""
        self.pools[key].users -= 1

    def close(self) -> None:
        """The card is gone; what is still allocated is only memory of the host."""
        self._closed = True


class PinnedMemory:
    """Which memory of the host is pinned."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        self._registered: dict[int, int] = {}

    def add(self, tensor: Tensor) -> Tensor:
        """`tensor`, whose memory is pinned from now on."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = StorageWeakRef(storage)
        return tensor

    def register(self, address: int, size: int, flags: int) -> int:
        """cudaHostRegister: 0, or cudaErrorHostMemoryAlreadyRegistered."""
        if address in self._registered:
            return 712
        self._registered[address] = size
        return 0

    def unregister(self, address: int) -> int:
        """cudaHostUnregister: 0, or cudaErrorHostMemoryNotRegistered."""
        return 713 if self._registered.pop(address, None) is None else 0

    def __contains__(self, tensor: Any) -> bool:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        size = self._registered.get(start)
        if size is not None and storage.nbytes() <= size:
            return True
        ref = self._storages.get(start)
        if ref is not None and ref.expired():
            del self._storages[start]
            return False
        return ref is not None
