"""A mapping of kept weights knows that its file was written, whatever its times say; so do forks of the process."""

from __future__ import annotations

import io
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inflight.config import EngineConfig
from inflight.loading.saved import mapped_file, weights_file
from inflight.loading.saved import prefetch as prefetch_module
from inflight.loading.saved.cache_folder import CacheFolder
from inflight.loading.saved.mapped_file import MappedFile
from inflight.loading.saved.prefetch import prefetch, prefetched


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    """With the file `a.iw`."""
    folder, tensors = CacheFolder(tmp_path / "weights", 2**30), [torch.arange(3000)]
    size = weights_file.size_of(tensors)
    assert folder.write("a.iw", size, lambda descriptor: weights_file.write(descriptor, "a", {}, tensors))
    return folder


def mapped(folder: CacheFolder) -> MappedFile:
    descriptor = folder.open("a.iw")
    assert descriptor is not None
    try:
        return MappedFile(descriptor, "a")
    finally:
        os.close(descriptor)


def changed_here_and_in_a_fork(file: MappedFile) -> set[bool]:
    pid = os.fork()
    if not pid:
        os._exit(file.is_unchanged)
    return {not file.is_unchanged, not os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}


def _rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff")


def _rewrite_with_the_same(path: Path) -> None:
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(byte)


def _cut(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 4096)
    os.truncate(path, size)


@pytest.mark.parametrize("change", [_rewrite, _rewrite_with_the_same, _cut])
def test_a_file_that_is_written_in_place_is_not_the_one_that_was_mapped(
    folder: CacheFolder, change: Callable[[Path], None]
) -> None:
    """Its size and its modification time are set as they were."""
    file, path = mapped(folder), folder.path / "a.iw"
    before = path.stat()
    assert changed_here_and_in_a_fork(file) == {False}
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert changed_here_and_in_a_fork(file) == {True}


def test_use_and_removal_are_no_writes(folder: CacheFolder) -> None:
    file = mapped(folder)
    mapped(folder)
    (folder.path / "a.iw").read_bytes()
    assert changed_here_and_in_a_fork(file) == {False}
    (folder.path / "a.iw").rename(folder.path / "b.iw")
    assert changed_here_and_in_a_fork(file) == {False}
    folder.drop("b.iw")
    assert changed_here_and_in_a_fork(file) == {False}


def test_a_process_with_thousands_of_open_files_can_ask(folder: CacheFolder) -> None:
    """`select` takes descriptors below 1024 only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1600:
        pytest.skip("the system allows no more open files")
    file = mapped(folder)
    assert file._writes is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1600), hard))
    try:
        os.dup2(file._writes.fileno(), 1500)
        file._writes = io.FileIO(1500)
        assert changed_here_and_in_a_fork(file) == {False}
        _rewrite_with_the_same(folder.path / "a.iw")
        assert changed_here_and_in_a_fork(file) == {True}
        file._writes.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_watch_that_the_system_refuses_is_none(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "_IN_MODIFY", 0)  # an invalid argument
    assert mapped(folder)._writes is None


def test_a_file_that_was_mapped_ahead_waits_for_the_load_that_asks_for_it(
    folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model that is loaded first does not discard its target's; one of another program is discarded."""
    tensors = [torch.arange(3000)]
    for key in ("target-old", "target-new"):
        size = weights_file.size_of(tensors)
        assert folder.write(
            f"{key}.iw", size, lambda descriptor, key=key: weights_file.write(descriptor, key, {}, tensors)
        )
    monkeypatch.setattr(prefetch_module, "cache_folder", lambda: folder)
    monkeypatch.setattr(prefetch_module, "checkpoint_key", lambda *_: "target")
    config = EngineConfig(model="m")
    prefetch(config)
    assert prefetched("draft-new") is None
    found = prefetched("target-new")
    assert found is not None and found.header.key == "target-new"
    assert prefetched("target-new") is None
    prefetch(config)
    assert prefetched("target-newer") is None and not prefetch_module._files


def test_where_nothing_can_be_watched_the_modification_time_tells(
    folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_file, "_watch", lambda descriptor: None)
    file = mapped(folder)
    assert changed_here_and_in_a_fork(file) == {False}
    os.utime(folder.path / "a.iw", (1, 1))
    assert changed_here_and_in_a_fork(file) == {True}
