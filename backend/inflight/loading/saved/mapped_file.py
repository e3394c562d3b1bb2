"""The format of a file of kept weights, and its mapping: every byte is checked before it is used.  No torch.

    0       magic, format, length of the header, XXH3-128 of the header
    32      the header, in msgpack
    N MiB   the tensors, as kernels read them: each at a multiple of 64 bytes, with 64 bytes behind it

All engines of a machine map one file, read-only: they share its pages, and a stray write ends the engine that makes it
instead of changing what others read.  The tensors begin at a multiple of 2 MiB and are written in larger pieces, so
that file systems with large folios keep them on huge pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import select
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import xxhash

from inflight.loading.saved.identity import FORMAT

__all__ = ["BLOCK", "MAGIC", "PREFIX", "Damaged", "Header", "Layout", "MappedFile", "read_header"]

MAGIC = b"INFLIGHT"
PREFIX = struct.Struct("<8sII16s")
BLOCK = 2**25  # has a checksum of its own, so that several threads can check
_MAX_HEADER = 2**26
_MAX_THREADS = 4
_MADV_POPULATE_READ = 22  # Linux 5.14
_IN_MODIFY = 2  # of inotify(7): a file is written or cut


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


class MappedFile:
    """An open file, with its tensors mapped and checked.

    This finds any byte that has changed until now.  It does not find one that the disk changes later, if the system
    drops a page and reads it again.

    Args:
        descriptor: of the file; this keeps one of its own.
        key: that the file must have.

    Attributes:
        data: all bytes of the tensors.

    Raises:
        Damaged: it is torn, changed, of another format or of another key.
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, key: str | None = None) -> None:
        self.header = read_header(descriptor, key)
        self._file = open(os.dup(descriptor), "rb", buffering=0)  # noqa: SIM115  it is closed with the mapping
        self._writes = _watch(descriptor)  # before its bytes are verified
        self._state = _state(descriptor)
        layout = self.header.layout
        mapping = mmap.mmap(descriptor, layout.start + layout.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._mapping = mapping
        self.data = memoryview(mapping)[layout.start :]
        blocks = [self.data[at : at + BLOCK] for at in range(0, layout.size, BLOCK)]
        with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
            if list(pool.map(xxhash.xxh3_128_digest, blocks)) != layout.sums:
                raise Damaged("its weights are changed")

    def map_pages(self) -> None:
        """Map all pages at once, in a process that has inherited the mapping but not its page tables.

        The first step would map them in many small pieces.
        """
        with contextlib.suppress(OSError):  # an old kernel, or a file that has been cut
            self._mapping.madvise(_MADV_POPULATE_READ)

    @property
    def is_unchanged(self) -> bool:
        """Whether the file has not been written or cut since it was mapped.  Dropping it changes nothing."""
        return self.is_of(self._file.fileno())

    def is_of(self, descriptor: int) -> bool:
        """Whether the descriptor is of this file, as it was when it was mapped."""
        return _state(descriptor) == self._state and not (self._writes and _is_readable(self._writes))


def read_header(descriptor: int, key: str | None = None) -> Header:
    """
    Args:
        key: that the file must have.

    Raises:
        Damaged: it is torn, changed, of another format or of another key.
    """
    prefix = os.pread(descriptor, PREFIX.size, 0)
    if len(prefix) < PREFIX.size:
        raise Damaged("it is truncated")
    magic, number, length, expected = PREFIX.unpack(prefix)
    if magic != MAGIC or number != FORMAT:
        raise Damaged(f"its format is not number {FORMAT}")
    encoded = os.pread(descriptor, length, PREFIX.size) if length <= _MAX_HEADER else b""
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


def _state(descriptor: int) -> tuple[int, int, int, int]:
    """Of a file; its times of use and of its names are not part of it."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _is_readable(file: io.FileIO) -> bool:
    poll = select.poll()  # takes any descriptor, where `select` takes those below 1024
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


def _watch(descriptor: int) -> io.FileIO | None:
    """Readable as soon as the file is written or cut by any process of this machine, also in forks of this one.

    A tool can set a modification time again; a change time is another after each use, and after a removal.
    A write through another process's mapping raises no event: the modification time tells, unless a tool sets it again.

    Returns:
        None where the system has no more of these; then size and modification time tell.
    """
    libc = ctypes.CDLL(None)
    watch = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if watch < 0:
        return None
    file = io.FileIO(watch)
    if libc.inotify_add_watch(watch, f"/proc/self/fd/{descriptor}".encode(), _IN_MODIFY) < 0:
        file.close()
        return None
    return file
