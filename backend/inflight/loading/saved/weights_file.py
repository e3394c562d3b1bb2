"""Tensors <-> a file of kept weights (`mapped_file.py` has its format)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from inflight.loading.saved.identity import FORMAT
from inflight.loading.saved.mapped_file import BLOCK, MAGIC, PREFIX, Header, Layout, MappedFile

__all__ = ["size_of", "tensors_of", "write"]

_DATA_ALIGNMENT, _ALIGNMENT, _SLACK = 2**21, 64, 64
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64
)}  # fmt: skip


def size_of(tensors: Sequence[Tensor]) -> int:
    """Bytes that these tensors take in a file, without the header."""
    return _offsets(tensors)[1]


def write(descriptor: int, key: str, content: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Write a whole file; the header last.  Raises OSError."""
    offsets, size = _offsets(tensors)
    entries = [
        (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)
        for tensor, offset in zip(tensors, offsets)
    ]
    header = Header(key, Layout(0, size, [bytes(16)] * -(-size // BLOCK), entries), content)
    room = PREFIX.size + len(msgspec.msgpack.encode(header)) + 16  # for `start`
    start = header.layout.start = -(-room // _DATA_ALIGNMENT) * _DATA_ALIGNMENT
    blocks = _Blocks(descriptor, start)
    for tensor, offset in zip(tensors, offsets):
        blocks.add(_bytes_of(tensor), offset)
    header.layout.sums = blocks.finish(size)
    encoded = msgspec.msgpack.encode(header)
    _write_all(descriptor, memoryview(encoded), PREFIX.size)
    prefix = PREFIX.pack(MAGIC, FORMAT, len(encoded), xxhash.xxh3_128_digest(encoded))
    _write_all(descriptor, memoryview(prefix), 0)


def tensors_of(file: MappedFile) -> list[Tensor]:
    """The tensors, views of the mapped file, which cannot be written."""
    address = np.frombuffer(file.data, dtype=np.uint8).ctypes.data if file.data else 0
    region = (ctypes.c_ubyte * len(file.data)).from_address(address)  # torch warns of memory that says it is read-only
    region.file = file  # type: ignore[attr-defined]  # mapped while a tensor lives
    found = []
    for name, shape, offset in file.header.layout.tensors:
        dtype = _DTYPES[name]
        count = torch.Size(shape).numel()
        flat = (
            torch.frombuffer(region, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        )
        found.append(flat.view(shape))
    return found


class _Blocks:
    """Writes pieces with zeros between them in whole blocks, which huge pages can hold, and takes their sums."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor, self._start = descriptor, start
        self._block = bytearray(BLOCK)
        self._end = 0  # of what was added
        self._sums: list[bytes] = []

    def add(self, data: memoryview, offset: int) -> None:
        self._fill(None, offset - self._end)
        self._fill(data, len(data))

    def finish(self, size: int) -> list[bytes]:
        """The sum of each block."""
        self._fill(None, size - self._end)
        if self._end % BLOCK:
            self._flush(self._end % BLOCK)
        return self._sums

    def _fill(self, data: memoryview | None, count: int) -> None:
        done = 0
        while done < count:
            at = self._end % BLOCK
            part = min(count - done, BLOCK - at)
            self._block[at : at + part] = bytes(part) if data is None else data[done : done + part]
            self._end, done = self._end + part, done + part
            if not self._end % BLOCK:
                self._flush(BLOCK)

    def _flush(self, count: int) -> None:
        with memoryview(self._block)[:count] as part:
            _write_all(self._descriptor, part, self._start + len(self._sums) * BLOCK)
            self._sums.append(xxhash.xxh3_128_digest(part))


def _offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins, and where the last one ends; kernels may read a little past an end."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-(tensor.nbytes + _SLACK) // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
