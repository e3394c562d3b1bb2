"""Copies of the adapters that a model has accepted, in a folder of this process.  No torch, no Triton.

    <cache>/adapters/<process>/lock          locked while the process lives; the next one removes what it has left
    <cache>/adapters/<process>/<number>/     the two files of one content

An operator can replace, truncate or delete a folder at any time, and a request that is replayed needs the same bytes.
So the files are copied: the kernel shares their blocks where the file system can (`copy_file_range`).  A hard link
would change with a file that is written in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from inflight.adapters.spec import CONFIG, WEIGHTS, AdapterError
from inflight.disk_room import lacks_room
from inflight.engine.adapter import AdapterRef

__all__ = ["AdapterFiles", "KeptAdapter", "files_folder"]

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe is not waited for
_CHUNK = 1 << 26
_LOCK = "lock"

Describe = Callable[[Path, str], AdapterRef]


class _Content:
    """A folder that is removed with the last reference to this object."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


@dataclass(frozen=True)
class KeptAdapter:
    """An adapter and its copy, which stays while anything refers to this object: a name, or an open request.

    Attributes:
        source: folder that it was copied from.
    """

    ref: AdapterRef
    source: str
    content: _Content


class AdapterFiles:
    """The copies of one process.  Any thread can call any method.

    Args:
        root: folder that processes of this user share.
        describe: checks the adapter in a folder, under a name; raises AdapterError.
    """

    def __init__(self, root: Path, describe: Describe) -> None:
        self._describe = describe
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards the next one
        self._contents: weakref.WeakValueDictionary[str, _Content] = weakref.WeakValueDictionary()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(root)
        with _locked(root / _LOCK):
            _sweep(root)
            self.folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root))
            self._alive = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._alive, fcntl.LOCK_EX)

    def keep(self, name: str, source: Path, within: Sequence[Path] | None = None) -> KeptAdapter:
        """Copy an adapter, and check the copy.

        Args:
            within: folders, resolved, in which its files must be; None: anywhere.

        Raises:
            AdapterError: it cannot be served, or not read.
        """
        folder = self.folder / str(next(self._numbers))
        folder.mkdir(mode=0o700)
        content = _Content(folder)
        try:
            self._copy(source, folder, within)
            ref = self._describe(folder, name)
        except AdapterError as error:  # it tells the operator's folder, not this one
            text = str(error).replace(str(folder), str(source))
            raise AdapterError(text if text.startswith("adapter ") else f"adapter {name!r}: {text}") from None
        except OSError as error:
            raise AdapterError(f"adapter {name!r}: {source} cannot be read: {error.strerror or error}") from None
        with self._lock:
            kept = self._contents.setdefault(ref.id, content)
        return KeptAdapter(msgspec.structs.replace(ref, path=str(kept.folder)), str(source), kept)

    def close(self) -> None:
        """Remove all copies."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._alive)

    def _copy(self, source: Path, folder: Path, within: Sequence[Path] | None) -> None:
        if not source.is_dir():
            raise AdapterError(f"there is no folder {source}; give one that PEFT's save_pretrained has written")
        if not (source / WEIGHTS).exists() and (source / "adapter_model.bin").exists():
            raise AdapterError(
                f"{source / 'adapter_model.bin'} is a pickle, which can run code; save the adapter as {WEIGHTS}"
            )
        for name in (CONFIG, WEIGHTS):
            with _opened(source / name, within) as descriptor:
                self._copy_file(descriptor, folder / name)

    def _copy_file(self, descriptor: int, target: Path) -> None:
        size = os.fstat(descriptor).st_size
        if (why := lacks_room(self.folder, size)) is not None:
            raise AdapterError(f"its copy of {why}; free some, or set INFLIGHT_CACHE to a folder on another disk")
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            left = size
            while left:
                copied = _copy_some(descriptor, out, min(left, _CHUNK))
                if not copied:
                    raise AdapterError(f"{target.name} became shorter while it was copied; copy it again")
                left -= copied
        finally:
            os.close(out)


def files_folder() -> Path:
    """The folder for `AdapterFiles`: beside the kept weights, or a temporary one if there is no such place."""
    named = os.environ.get("INFLIGHT_CACHE", "")
    home = os.environ.get("XDG_CACHE_HOME", "")
    if named.lower() not in ("off", "0", "false"):
        with contextlib.suppress(RuntimeError, OSError):  # no home, or one that cannot be written
            own = Path(home if os.path.isabs(home) else Path.home() / ".cache") / "inflight"
            root = (Path(named).expanduser() if named else own) / "adapters"
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(root, os.W_OK):
                return root
    return Path(tempfile.gettempdir()) / f"inflight-adapters-{os.geteuid()}"


@contextlib.contextmanager
def _opened(path: Path, within: Sequence[Path] | None) -> Iterator[int]:
    """A descriptor of a regular file that is in one of the folders."""
    try:
        descriptor = os.open(path, _OPEN)
    except FileNotFoundError:
        raise AdapterError(f"{path.parent} has no {path.name}; give a folder of PEFT's save_pretrained") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AdapterError(f"{path} is no file; give a folder of PEFT's save_pretrained")
        # Of the file that is open: links can change between a look and the next.
        real = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if within is not None and not any(real.is_relative_to(folder) for folder in within):
            raise AdapterError(f"{path} leads out of the folders that lora_allowed_paths of model.json lists")
        yield descriptor
    finally:
        os.close(descriptor)


def _copy_some(source: int, target: int, size: int) -> int:
    """Copy up to `size` bytes, from and to where the descriptors are; returns how many."""
    try:
        return os.copy_file_range(source, target, size)
    except OSError:  # another file system, or one that cannot
        data = os.read(source, min(size, 1 << 20))
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]
        return len(data)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(root: Path) -> None:
    """Remove the folders of processes that have ended."""
    for folder in root.iterdir():
        if folder.is_symlink() or not folder.is_dir():
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _check_private(root: Path) -> None:
    found = os.stat(root, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise AdapterError(
            f"{root} is no folder that only this user can write, so adapters cannot be copied to it; remove it, or set "
            "INFLIGHT_CACHE to a folder of this user"
        )
