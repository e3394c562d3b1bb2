"""A KV store in a directory: a local disk, or a volume that several machines share.  No torch.

    <path>/<namespace>/<hh>/<key>                   an extent, from its seal to its last byte
    <path>/<namespace>/<hh>/.<key>.<pid>.<n>.part   one that is being written

A file appears whole, by `os.replace`, or not at all.  Nothing is synced: what a failing machine leaves torn does not
match its seal.  Names are hashes, and files belong to this user alone.  The namespaces of all models and versions share
the bound on the size; the files not read for longest go first.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from inflight.engine.tiers.base import Frames, TornError
from inflight.runner.stores.directory_size import evict

__all__ = ["DirectoryStore"]

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in the place of a file is not waited for
_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")
_TOUCHED_SECONDS = 60  # a file's time of use is set at most so often
_SHRUNK_SECONDS = 600.0  # until a disk that was full may have room again
_SCANS = 32  # the directory is read whenever 1 / 32 of the bound was written


class DirectoryStore:
    """Implements `KVStore`.

    Args:
        path: of the directory; it need not exist.
        namespace: what the KV belongs to, as hexadecimal digits.
        max_bytes: of all files; engines that share the directory should have the same.
    """

    def __init__(self, path: Path, namespace: str, max_bytes: int) -> None:
        self._path = path
        self._folder = path / namespace
        self._configured = self._max_bytes = max_bytes
        self._shrunk_until = 0.0
        self._num_bytes = 0
        self._unscanned = max_bytes  # bytes written since the last scan: the first write scans
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of the two counts

    @property
    def num_bytes(self) -> int:
        """As of the last scan, and what this store has written since; of all namespaces."""
        return self._num_bytes

    def find(self, keys: Sequence[bytes]) -> int:
        return next((index for index, key in enumerate(keys) if not self._has(key)), len(keys))

    def first_of(self, keys: Sequence[bytes]) -> int:
        return next((index for index, key in enumerate(keys) if self._has(key)), len(keys))

    def load(self, key: bytes, frames: Frames) -> bool:
        """See `KVStore`.  A file that someone else can have written is removed.

        Raises:
            PermissionError: there was such a file.
            TornError: it has another size.
            OSError: it cannot be read.
        """
        path = self._file(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._refused(key) from None
            raise
        try:
            if not _is_private(os.fstat(descriptor), stat.S_ISREG):
                raise self._refused(key)
            _read(descriptor, frames)
        except TornError:
            self.drop(key)
            raise
        finally:
            os.close(descriptor)
        return True

    def store(self, key: bytes, frames: Frames) -> bool:
        path, size = self._file(key), sum([frame.nbytes for frame in frames])
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.stat(path, follow_symlinks=False).st_size == size:
                return True  # another engine was first
        if not self._has_room(size):
            return False
        try:
            self._write(path, frames)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._shrink()
            raise
        with self._lock:
            self._num_bytes += size
            self._unscanned += size
        return True

    def drop(self, key: bytes) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._file(key))

    def close(self) -> None:
        pass

    def _refused(self, key: bytes) -> PermissionError:
        """The error of a file that is no file of this user alone, which is removed."""
        self.drop(key)
        return PermissionError(errno.EPERM, "not a file that only this user can write; it is removed", self._file(key))

    def _has(self, key: bytes) -> bool:
        """Raises OSError."""
        try:
            return stat.S_ISREG(os.stat(self._file(key), follow_symlinks=False).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _file(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}"

    def _write(self, path: str, frames: Frames) -> None:
        """Raises OSError."""
        folder, name = os.path.split(path)
        part = f"{folder}/.{name}.{os.getpid()}.{next(self._numbers)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
        try:
            descriptor = os.open(part, flags, 0o600)
        except FileNotFoundError:
            self._make(folder)
            descriptor = os.open(part, flags, 0o600)
        try:
            try:
                buffers = list(frames)
                while buffers:
                    some = buffers[:_MOST_BUFFERS]
                    buffers = _behind(some, os.writev(descriptor, some)) + buffers[_MOST_BUFFERS:]
            finally:
                os.close(descriptor)  # a full disk behind a network can show here
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise

    def _make(self, folder: str) -> None:
        """Make a folder of keys and the folders that contain it.

        Raises:
            PermissionError: someone else owns one or can write it.
            OSError: it cannot be made.
        """
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (str(self._folder), folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            if not _is_private(os.stat(path, follow_symlinks=False), stat.S_ISDIR):
                raise PermissionError(errno.EPERM, "not a folder that only this user can write", path)

    def _has_room(self, size: int) -> bool:
        """Whether a file of that size fits into the bound, perhaps in place of others."""
        if time.monotonic() >= self._shrunk_until:
            self._max_bytes = self._configured
        if size > self._max_bytes:
            raise OSError(errno.ENOSPC, f"an extent has {size} bytes, and the tier's size is {self._max_bytes}")
        with self._lock:
            crowded = self._num_bytes + size > self._max_bytes
            scans = crowded or self._unscanned >= self._max_bytes // _SCANS
            if scans:
                self._unscanned = 0
        if not scans:
            return True
        return self._scan(size) or not crowded

    def _shrink(self) -> None:
        """The disk is full although the bound is not reached: what is there becomes the bound, for some minutes."""
        left = evict(self._path, 2**62, 0)
        if left is not None:
            self._max_bytes, self._shrunk_until = min(self._max_bytes, left), time.monotonic() + _SHRUNK_SECONDS
            self._scan(self._max_bytes // 8)

    def _scan(self, wanted: int) -> bool:
        """Read the directory, and make room; False if another engine does that just now."""
        left = evict(self._path, self._max_bytes, wanted)
        if left is None:
            return False
        with self._lock:
            self._num_bytes = left
        return True


def _read(descriptor: int, frames: Frames) -> None:
    """Read a file of exactly that size into the frames, and note that it was used.  Raises TornError, OSError."""
    found = os.fstat(descriptor)
    if found.st_size != (size := sum([frame.nbytes for frame in frames])):
        raise TornError(f"a file has {found.st_size} bytes, and {size} were expected")
    buffers, offset = list(frames), 0
    while buffers:
        some = buffers[:_MOST_BUFFERS]
        count = os.preadv(descriptor, some, offset)
        if not count:
            raise TornError(f"a file of {size} bytes ended at {offset}")
        offset, buffers = offset + count, _behind(some, count) + buffers[_MOST_BUFFERS:]
    if found.st_atime < time.time() - _TOUCHED_SECONDS:
        with contextlib.suppress(OSError):  # a file system that is only readable
            os.utime(descriptor, ns=(time.time_ns(), found.st_mtime_ns))


def _is_private(found: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Whether it is of that kind, and only this user can write it."""
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _behind(buffers: Frames, count: int) -> list[memoryview]:
    """The rest of buffers after their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[index + 1 :]]
        count -= buffer.nbytes
    return []
