"""Weights that were kept after the spare process of their engines was prepared.  No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from inflight.config import EngineConfig
from inflight.loading.load_errors import CannotKeep
from inflight.loading.saved.cache_folder import cache_folder
from inflight.loading.saved.identity import checkpoint_key

__all__ = ["NewlyKept"]

_File = tuple[str, int, int]  # name, inode, mtime in ns


class NewlyKept:
    """Compared with the moment in which this is made.

    Weights that were there then can be of another program or damaged, so that nothing could be mapped: whether some are
    kept says nothing.  A file in the place of another counts.

    Args:
        config: options of the model.
        draft: returns those of its draft model, if it has one; called once anything is kept.
    """

    def __init__(self, config: EngineConfig, draft: Callable[[], EngineConfig | None] = lambda: None) -> None:
        self._config = config
        self._draft = draft
        self._known = _files()

    def any(self) -> bool:
        """Whether there are weights of these models that were not there.  Reads checkpoints only if some are."""
        new = _files() - self._known
        if not new:
            return False
        self._known |= new
        return any(_is_of(config, new) for config in (self._config, self._draft()) if config is not None)


def _is_of(config: EngineConfig, files: set[_File]) -> bool:
    """Whether one of these files has the weights of this checkpoint."""
    with contextlib.suppress(CannotKeep):
        cache = cache_folder()
        key = None if cache is None else checkpoint_key(config, cache)
        return key is not None and any(name.startswith(key) for name, *_ in files)
    return False


def _files() -> set[_File]:
    """All kept weights."""
    found: set[_File] = set()
    with contextlib.suppress(CannotKeep):
        cache = cache_folder()
        for path in [] if cache is None else cache.files():
            with contextlib.suppress(OSError):  # another process has dropped it
                status = path.lstat()
                found.add((path.name, status.st_ino, status.st_mtime_ns))
    return found
