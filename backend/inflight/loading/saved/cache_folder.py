"""The folder of kept weights: private to this user, written atomically by one process at a time, bounded.  No torch.

$INFLIGHT_CACHE, else $XDG_CACHE_HOME/inflight, else ~/.cache/inflight          INFLIGHT_CACHE=off: nothing is kept
    weights/<checkpoint>-<program>.iw     a kept load (`weights_file.py`)
    weights/<checkpoint>-<program>.part   one that is being written, by the process that has locked it
    weights/<digest>.digest               what has been read of a checkpoint's file (`identity.py`)
    weights/<digest>.length               of requests with a draft model (`draft_length.py`)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from inflight.config import ConfigError, parse_bytes
from inflight.disk_room import lacks_room
from inflight.loading.load_errors import CannotKeep

__all__ = ["CacheFolder", "cache_folder"]

_DEFAULT_SIZE = "20GiB"
_NOTE_BYTES = 4096
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe that someone has put there is not waited for


def cache_folder() -> CacheFolder | None:
    """The folder that the environment names; None if nothing is to be kept."""
    named = os.environ.get("INFLIGHT_CACHE", "")
    if named.lower() in ("off", "0", "false"):
        return None
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = (
            Path(named).expanduser()
            if named
            else Path(home if os.path.isabs(home) else Path.home() / ".cache") / "inflight"
        )
    except RuntimeError:  # no home
        return None
    size = os.environ.get("INFLIGHT_CACHE_SIZE") or _DEFAULT_SIZE
    try:
        return CacheFolder(root / "weights", parse_bytes(int(size) if size.isdecimal() else size))
    except ConfigError as error:
        raise CannotKeep(f"INFLIGHT_CACHE_SIZE: {error}") from None


class CacheFolder:
    """
    Args:
        path: of the folder; it need not exist.
        max_bytes: of all kept weights; the ones not used for longest are dropped.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes

    def files(self) -> list[Path]:
        """All kept weights, the ones not used for longest first."""
        found = []
        for path in self.path.glob("*.iw"):
            with contextlib.suppress(OSError):  # another process has dropped it
                found.append((path.lstat().st_atime_ns, path))
        return [path for _, path in sorted(found)]

    def open(self, name: str) -> int | None:
        """A descriptor to read the file from, which is now the one used last; None if there is no such file.

        The time of access says when it was used.  That of modification stays: processes that map the file compare it.

        Raises:
            CannotKeep: someone else can have written it.
            OSError: it cannot be opened.
        """
        try:
            descriptor = os.open(self.path / name, os.O_RDONLY | _FLAGS)
        except FileNotFoundError:
            return None
        try:
            _expect_ours(self.path, os.stat(self.path, follow_symlinks=False), stat.S_ISDIR)
            _expect_ours(self.path / name, os.fstat(descriptor), stat.S_ISREG)
        except BaseException:
            os.close(descriptor)
            raise
        with contextlib.suppress(OSError):  # a file system that is only readable
            os.utime(descriptor, ns=(time.time_ns(), os.fstat(descriptor).st_mtime_ns))
        return descriptor

    def write(self, name: str, size: int, fill: Callable[[int], None]) -> bool:
        """Let `fill` write a file of `size` bytes to a descriptor; the file appears whole, or not at all.

        Returns:
            False if another process is writing it.

        Raises:
            CannotKeep: the folder is someone else's, or there is no room for it.
            OSError: the disk is full, or the folder cannot be written.
        """
        self._make()
        part = self.path / f"{name.removesuffix('.iw')}.part"
        with self._locked(part) as descriptor:
            if descriptor is None:
                return False
            try:
                self._make_room(size, keep=name)
                os.ftruncate(descriptor, 0)
                fill(descriptor)
                os.fsync(descriptor)
                part.rename(self.path / name)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        self._sync()
        return True

    def drop(self, name: str) -> None:
        """Remove it; an engine that has mapped it goes on."""
        with contextlib.suppress(OSError):
            (self.path / name).unlink(missing_ok=True)

    def read_note(self, name: str) -> bytes:
        """A small file.  Raises OSError."""
        try:
            descriptor = self.open(name)
        except CannotKeep as error:
            raise OSError(str(error)) from None
        if descriptor is None:
            return b""
        try:
            return os.read(descriptor, _NOTE_BYTES)
        finally:
            os.close(descriptor)

    def write_note(self, name: str, content: bytes) -> None:
        """Write a small file, if that is possible."""
        with contextlib.suppress(OSError, CannotKeep):
            self._make()
            part = self.path / f"{name}.{os.getpid()}.note"
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS, 0o600)
            try:
                os.write(descriptor, content)
            finally:
                os.close(descriptor)
            part.rename(self.path / name)

    def _make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _expect_ours(self.path, os.stat(self.path, follow_symlinks=False), stat.S_ISDIR)

    @contextlib.contextmanager
    def _locked(self, part: Path) -> Iterator[int | None]:
        """A descriptor of an unfinished file that no other process writes; None if one does.

        A writer that was killed leaves its file behind, but no lock.
        """
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            _expect_ours(part, os.fstat(descriptor), stat.S_ISREG)
            here = os.stat(part) if part.exists() else None
            renamed = here is None or not os.path.samestat(here, os.fstat(descriptor))
            yield None if renamed else descriptor  # its writer has finished it between the two calls above
        finally:
            os.close(descriptor)

    def _make_room(self, size: int, keep: str) -> None:
        """Drop what was not used for longest, and what killed writers have left."""
        if size > self.max_bytes:
            raise CannotKeep(f"{size} bytes exceed INFLIGHT_CACHE_SIZE, {self.max_bytes} bytes")
        for part in self.path.glob("*.part"):
            if part.stem != keep.removesuffix(".iw"):
                with contextlib.suppress(OSError), self._locked(part) as descriptor:
                    if descriptor is not None:
                        part.unlink()
        kept = [path for path in self.files() if path.name != keep]
        sizes = [path.lstat().st_blocks * 512 for path in kept if path.exists()]
        for path, _ in zip(kept, list(sizes)):
            if size + sum(sizes) <= self.max_bytes:
                break
            sizes.pop(0)
            self.drop(path.name)
        if (why := lacks_room(self.path, size)) is not None:
            raise CannotKeep(why)

    def _sync(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _expect_ours(path: Path, found: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """
    Raises:
        CannotKeep: another user owns it or can write it, or it is something else.
    """
    if not is_kind(found.st_mode):
        raise CannotKeep(f"{path} is no plain file or folder")
    if found.st_uid != os.geteuid():
        raise CannotKeep(f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}")
    if found.st_mode & 0o022:
        raise CannotKeep(f"{path} can be written by other users; chmod go-w it")
