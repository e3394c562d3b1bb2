"""Maps and verifies kept weights while torch is being imported: hashing holds no lock of Python's.  No torch."""

from __future__ import annotations

import contextlib
import os
import threading

from inflight.config import EngineConfig
from inflight.loading.load_errors import CannotKeep
from inflight.loading.saved.cache_folder import cache_folder
from inflight.loading.saved.identity import checkpoint_key
from inflight.loading.saved.mapped_file import Damaged, MappedFile

__all__ = ["prefetch", "prefetched"]

_threads: list[threading.Thread] = []
_files: list[MappedFile] = []


def prefetch(config: EngineConfig) -> None:
    """Begin with the file that was used last of this checkpoint, if there is any."""
    thread = threading.Thread(target=_prefetch, args=(config,), name="prefetch", daemon=True)
    _threads.append(thread)
    thread.start()


def prefetched(key: str) -> MappedFile | None:
    """The file of this key, if it was one that `prefetch` has mapped; once.  Those of other checkpoints stay."""
    while _threads:
        _threads.pop().join()
    checkpoint = key.partition("-")[0]
    files = [file for file in _files if file.header.key.startswith(checkpoint)]
    _files[:] = [file for file in _files if file not in files]
    return next((file for file in files if file.header.key == key), None)


def _prefetch(config: EngineConfig) -> None:
    """Leaves files that are damaged or unreadable to the load, which reports them."""
    with contextlib.suppress(OSError, CannotKeep, Damaged):
        cache = cache_folder()
        if cache is None or not (files := cache.files()):
            return
        checkpoint = checkpoint_key(config, cache)
        names = [path.name for path in files if path.name.startswith(checkpoint)]
        descriptor = cache.open(names[-1]) if names else None
        if descriptor is None:
            return
        try:
            _files.append(MappedFile(descriptor, names[-1].removesuffix(".iw")))
        finally:
            os.close(descriptor)
