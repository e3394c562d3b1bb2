"""All data of the host about a step, in one copy to the device.

The host's arrays are laid side by side in a pinned buffer, and their readers get views of a device buffer whose
address never changes:

    host    [ rows | new blocks | sampling columns | new tokens, if few | what rules need ]
              `copy`: one copy, non_blocking
    device  [ rows | new blocks | sampling columns | ...

The same sizes give the same addresses, step after step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "StepUpload", "upload_bytes"]

ALIGNMENT = 16  # bytes; kernels are compiled for pointers that are multiples of it
# Bytes for a row (lines, a new block), for a token that yields logits (sampling columns), and for all else.
_ROW_BYTES, _LOGITS_BYTES, _OTHER_BYTES = 40, 56, 2**18

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def upload_bytes(max_num_seqs: int, max_num_tokens: int) -> int:
    """A capacity that fits all usual steps; an array that does not fit is copied apart."""
    size = max_num_seqs * _ROW_BYTES + max_num_tokens * _LOGITS_BYTES + _OTHER_BYTES
    return -(-size // ALIGNMENT) * ALIGNMENT


class StepUpload:
    """The arrays of one step.

    Args:
        host: uint8 [capacity], pinned; must not be written by others until `copy` has run on the device.
        device: uint8 [capacity], shared by all steps: the device's queue runs a step's copy after the step before.
    """

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self._host = host
        self._bytes: Any = host.numpy()
        self._device = device
        self._used = 0
        self._others: list[tuple[Tensor, Tensor]] = []  # pinned and device tensors of the arrays that do not fit

    def put(self, array: np.ndarray) -> Tensor:
        """The array's place on the device, of its shape; it has the array's contents once `copy` has run."""
        if not array.size:
            return torch.empty(array.shape, dtype=_DTYPES[array.dtype], device=self._device.device)
        room, tensor = self.reserve(array.shape, array.dtype)
        room[...] = array
        return tensor

    def reserve(self, shape: tuple[int, ...], dtype: Any, apart: bool = False) -> tuple[np.ndarray, Tensor]:
        """Room for an array, for the caller to fill before `copy`, and its place on the device.

        Args:
            apart: copy it by itself even if it would fit.
        """
        dtype = np.dtype(dtype)
        size = dtype.itemsize * math.prod(shape)
        start, end = self._used, self._used + size
        if apart or end > len(self._bytes):
            return self._apart(shape, dtype)
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        room = self._bytes[start:end].view(dtype).reshape(shape)
        return room, self._device[start:end].view(_DTYPES[dtype]).view(shape)

    def copy(self) -> None:
        """Copy everything to the device; part of the step's work there."""
        end = min(self._used, len(self._bytes))
        if end:
            self._device[:end].copy_(self._host[:end], non_blocking=True)
        for host, device in self._others:
            device.copy_(host, non_blocking=True)

    def _apart(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, Tensor]:
        """A copy of its own: thousands of tokens that enter at once, large biases."""
        pinned = self._device.is_cuda
        host = torch.empty(shape, dtype=_DTYPES[dtype], pin_memory=pinned)
        device = torch.empty(shape, dtype=_DTYPES[dtype], device=self._device.device)
        self._others.append((host, device))
        return host.numpy(), device
