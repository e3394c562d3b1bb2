"""The format of a file of kept weights: what is read of it is checked, byte by byte.

    0       magic, format, length of the header, XXH3-128 of the header
    32      the header, in msgpack
    N MiB   the tensors, as kernels read them: each at a multiple of 64 bytes, with 64 bytes behind it

The tensors begin at a multiple of 2 MiB, so that the file can be mapped on huge pages.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from inflight.kernels.cpu.library import allocate
from inflight.loading.saved.identity import FORMAT

__all__ = ["Damaged", "Header", "Layout", "read_header", "read_tensors", "size_of", "write"]

_MAGIC = b"INFLIGHT"
_PREFIX = struct.Struct("<8sII16s")
_DATA_ALIGNMENT, _ALIGNMENT, _SLACK = 2**21, 64, 64
_MAX_HEADER = 2**26
_BLOCK = 2**25  # has a checksum of its own, so that several threads can read
_MAX_THREADS = 4
_CHUNK = 2**20  # stays in a core's cache between the read and the digest
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64
)}  # fmt: skip


class Damaged(Exception):
    """The file is not what was written; says where."""


class Layout(msgspec.Struct, forbid_unknown_fields=True):
    """Where the tensors are.

    Attributes:
        start: offset of the first one in the file.
        size: bytes from there to the end.
        sums: XXH3-128 of each 32 MiB of these.
        tensors: dtype, shape, and offset from `start`.
    """

    start: int
    size: int
    sums: list[bytes]
    tensors: list[tuple[str, list[int], int]]


class Header(msgspec.Struct, forbid_unknown_fields=True):
    """
    Attributes:
        key: of checkpoint and program, the file's name without its ending.
        layout: of the tensors.
        content: what they belong to.
    """

    key: str
    layout: Layout
    content: dict[str, Any]


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
    header = Header(key, Layout(0, size, [bytes(16)] * -(-size // _BLOCK), entries), content)
    room = _PREFIX.size + len(msgspec.msgpack.encode(header)) + 16  # for `start`
    start = header.layout.start = -(-room // _DATA_ALIGNMENT) * _DATA_ALIGNMENT
    sums, end = _Sums(), 0
    for tensor, offset in zip(tensors, offsets):
        sums.add(memoryview(bytes(offset - end)))
        data = _bytes_of(tensor)
        for at in range(0, len(data), _CHUNK):
            part = data[at : at + _CHUNK]
            sums.add(part)
            _write_all(descriptor, part, start + offset + at)
        end = offset + len(data)
    sums.add(memoryview(bytes(size - end)))
    os.ftruncate(descriptor, start + size)
    header.layout.sums = sums.found
    encoded = msgspec.msgpack.encode(header)
    _write_all(descriptor, memoryview(encoded), _PREFIX.size)
    prefix = _PREFIX.pack(_MAGIC, FORMAT, len(encoded), xxhash.xxh3_128_digest(encoded))
    _write_all(descriptor, memoryview(prefix), 0)


def read_header(descriptor: int, key: str | None = None) -> Header:
    """
    Args:
        key: that the file must have.

    Raises:
        Damaged: it is torn, changed, of another format or of another key.
    """
    prefix = os.pread(descriptor, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise Damaged("it is truncated")
    magic, number, length, expected = _PREFIX.unpack(prefix)
    if magic != _MAGIC or number != FORMAT:
        raise Damaged(f"its format is not number {FORMAT}")
    encoded = os.pread(descriptor, length, _PREFIX.size) if length <= _MAX_HEADER else b""
    if len(encoded) < length or xxhash.xxh3_128_digest(encoded) != expected:
        raise Damaged("its header is changed or truncated")
    try:
        header = msgspec.msgpack.decode(encoded, type=Header)
    except msgspec.MsgspecError as error:
        raise Damaged(f"its header is another: {error}") from None
    if key is not None and header.key != key:
        raise Damaged(f"it is {header.key}, and {key} was expected")
    if os.fstat(descriptor).st_size != header.layout.start + header.layout.size:
        raise Damaged("it is truncated")
    return header


def read_tensors(descriptor: int, layout: Layout) -> list[Tensor]:
    """The tensors, on huge pages if available.

    Raises:
        Damaged: their bytes have changed since they were written.
    """
    memory = allocate(layout.size, dtype=torch.uint8)
    view, starts = memoryview(memory.numpy().data), range(0, layout.size, _BLOCK)
    # The first write to fresh memory is slow: on a virtual machine 0.8 GB/s a thread, about a quarter of the next one.
    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        read = [pool.submit(_read_block, descriptor, view[at : at + _BLOCK], layout.start + at) for at in starts]
        if [each.result() for each in read] != layout.sums:
            raise Damaged("its weights are changed")
    found = []
    for name, shape, offset in layout.tensors:
        dtype = _DTYPES[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        found.append(memory[offset : offset + size].view(dtype).view(shape))
    return found


def _read_block(descriptor: int, block: memoryview, offset: int) -> bytes:
    """Fill `block` from `offset` of the file; returns the sum of its bytes."""
    state = xxhash.xxh3_128()
    for at in range(0, len(block), _CHUNK):
        part = block[at : at + _CHUNK]
        if os.preadv(descriptor, [part], offset + at) != len(part):
            raise Damaged("it is truncated")
        state.update(part)
    return state.digest()


class _Sums:
    """Of the bytes that are added, the sums of each full block, and of the last one."""

    def __init__(self) -> None:
        self.found: list[bytes] = []
        self._state, self._room = xxhash.xxh3_128(), 0

    def add(self, data: memoryview) -> None:
        while len(data):
            if not self._room:
                self._state, self._room = xxhash.xxh3_128(), _BLOCK
                self.found.append(b"")
            part, data = data[: self._room], data[self._room :]
            self._state.update(part)
            self._room -= len(part)
            self.found[-1] = self._state.digest()


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
