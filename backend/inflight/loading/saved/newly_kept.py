"""Weights of a checkpoint that were kept after its spare process was prepared.  No torch."""

from __future__ import annotations

import contextlib

from inflight.config import EngineConfig
from inflight.loading.load_errors import CannotKeep
from inflight.loading.saved.cache_folder import cache_folder
from inflight.loading.saved.identity import checkpoint_key

__all__ = ["NewlyKept"]


class NewlyKept:
    """Compared with the moment in which this is made.

    Weights that were there then can be of another program or damaged, so that nothing could be mapped: whether some are
    kept says nothing.  A file in the place of another counts.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._known = _files()

    def any(self) -> bool:
        """Whether there are weights of this checkpoint that were not there.  Reads the checkpoint only if some are."""
        new = _files() - self._known
        if not new:
            return False
        self._known |= new
        with contextlib.suppress(CannotKeep):
            cache = cache_folder()
            key = None if cache is None else checkpoint_key(self._config, cache)
            return key is not None and any(name.startswith(key) for name, *_ in new)
        return False


def _files() -> set[tuple[str, int, int]]:
    """Name, inode and mtime of all kept weights."""
    found: set[tuple[str, int, int]] = set()
    with contextlib.suppress(CannotKeep):
        cache = cache_folder()
        for path in [] if cache is None else cache.files():
            with contextlib.suppress(OSError):  # another process has dropped it
                status = path.lstat()
                found.add((path.name, status.st_ino, status.st_mtime_ns))
    return found
