"""The bound on the size of a directory of extents that several engines share.  No torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

__all__ = ["evict"]

_KEPT = 7, 8  # of the bound, once files are removed: not each write must look for some
_UNFINISHED_SECONDS = 600  # the age at which a file that no writer has finished is left over
_NAME_CHARACTERS = 32  # of a namespace and of a key, in hexadecimal digits


def evict(path: Path, max_bytes: int, wanted: int) -> int | None:
    """Remove the files not used for longest until `wanted` bytes and an eighth of the bound are free; only if needed.

    Returns:
        The bytes that are left; None if another process does it now.

    Raises:
        OSError: the directory cannot be read.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return _evict(path, max_bytes, wanted)
    finally:
        os.close(lock)


def _evict(path: Path, max_bytes: int, wanted: int) -> int:
    times, sizes = array("q"), array("q")  # a million files are 16 MB
    oldest_part = time.time_ns() - _UNFINISHED_SECONDS * 10**9
    for file, found in _files(path):
        if file.name.startswith("."):
            if found.st_mtime_ns < oldest_part:
                _unlink(file.path)
        else:
            times.append(found.st_atime_ns)
            sizes.append(found.st_size)
    total = sum(sizes)
    if total + wanted <= max_bytes:
        return total
    surplus = total - min(max_bytes - wanted, max_bytes * _KEPT[0] // _KEPT[1])
    order = np.argsort(times, kind="stable")
    removed = int(np.searchsorted(np.cumsum(np.frombuffer(sizes, np.int64)[order]), surplus))
    last = times[order[min(removed, len(order) - 1)]]
    for file, found in _files(path):
        if surplus > 0 and found.st_atime_ns <= last and not file.name.startswith("."):
            _unlink(file.path)
            surplus -= found.st_size
            total -= found.st_size
    return total


def _files(path: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """All files of all namespaces; what others put there is left out, and links are not followed."""
    for namespace in _folders(str(path), _NAME_CHARACTERS):
        for folder in _folders(namespace, 2):
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):  # another engine has removed it
                        if entry.is_file(follow_symlinks=False) and _is_ours(entry.name):
                            yield entry, entry.stat(follow_symlinks=False)


def _is_ours(name: str) -> bool:
    return len(name) == _NAME_CHARACTERS or (name.startswith(".") and name.endswith(".part"))


def _folders(path: str, characters: int) -> list[str]:
    with os.scandir(path) if os.path.isdir(path) else contextlib.nullcontext(()) as entries:
        return [one.path for one in entries if len(one.name) == characters and one.is_dir(follow_symlinks=False)]


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
