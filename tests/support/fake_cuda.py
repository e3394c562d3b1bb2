"""torch.cuda's accounting over CPU tensors: memory allocated, kept by the allocator, and free on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeCuda(TorchDispatchMode):
    """While the mode is on, every tensor that an operation makes counts, until nothing refers to its memory.

    Like the caching allocator it keeps freed memory until `empty_cache`, and raises OutOfMemoryError if live tensors
    exceed the memory that other processes leave.

    Args:
        total: bytes of the device.
        others: bytes that other processes hold.
    """

    def __init__(self, total: int, others: int = 0) -> None:
        super().__init__()
        self.total = total
        self.others = others
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._reserved = self._peak = 0
        self._at_most = 0  # alive, or freed since then

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return result

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        ref = StorageWeakRef(storage)
        if ref.cdata in self._alive and not self._alive[ref.cdata][0].expired():
            return
        self._alive[ref.cdata] = ref, storage.nbytes()
        self._at_most += storage.nbytes()
        if self._at_most <= self._reserved:
            return
        if self.memory_allocated() > self.total - self.others:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")
        self._reserved = max(self._reserved, self._at_most)
        self._peak = max(self._peak, self._reserved)

    def count_weights(self, model: nn.Module) -> nn.Module:
        """Weights come from threads in which the mode is off."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.count(tensor)
        return model

    def memory_allocated(self, device: Any = None) -> int:
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            del self._alive[key]
        self._at_most = sum(size for _, size in self._alive.values())
        return self._at_most

    def memory_reserved(self, device: Any = None) -> int:
        return self._reserved

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._peak = self._reserved

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.total - self.others - self._reserved, self.total

    def empty_cache(self) -> None:
        self._reserved = self.memory_allocated()

    def synchronize(self, device: Any = None) -> None:
        pass
