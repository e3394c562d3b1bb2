"""A directory of extents under everything that can happen to a file system: no file is believed that is not whole."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from extents import blank, content, frames_of, key
from nightly import nightly_but
from small_disk import can_only_be_read, small_disk

from inflight.engine.tiers.base import TornError
from inflight.runner.stores import directory
from inflight.runner.stores.directory import DirectoryStore
from inflight.runner.stores.directory_size import evict

SIZE = 20_000
PIECE = 1200  # bytes of a write: some hundred moments
NAMESPACE = "0f" * 16
ROOM = 2**30


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "kv", NAMESPACE, ROOM)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_disk(tmp_path / "disk", 1) as path:
        yield path


def write(store: DirectoryStore, number: int, size: int = SIZE) -> bool:
    return store.store(key(number), frames_of(content(number, size)))


def is_right(store: DirectoryStore, number: int, size: int = SIZE) -> bool:
    """Whether it is there; never something else."""
    memory, frames = blank(size)
    loaded = store.load(key(number), frames)
    assert not loaded or memory == content(number, size)
    return loaded


def file(store: DirectoryStore, number: int) -> Path:
    return Path(store._file(key(number)))


def test_files_are_private(store: DirectoryStore, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        write(store, 1)
    finally:
        os.umask(umask)
    path = file(store, 1)
    assert path == tmp_path / "kv" / NAMESPACE / key(1).hex()[:2] / key(1).hex()
    assert path.stat().st_mode & 0o777 == 0o600
    assert {folder.stat().st_mode & 0o777 for folder in list(path.parents)[:3]} == {0o700}
    assert [one.name for one in path.parent.iterdir()] == [path.name], "no unfinished file is left"


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _foreign(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    "change, error",
    [
        (_link, PermissionError),
        (_pipe, PermissionError),
        (_foreign, PermissionError),
        (lambda path: path.chmod(0o620), PermissionError),
        (lambda path: path.chmod(0o602), PermissionError),
        (lambda path: os.truncate(path, SIZE - 1), TornError),
        (lambda path: os.truncate(path, 0), TornError),
        (lambda path: os.truncate(path, SIZE + 1), TornError),
    ],
    ids=["link", "pipe", "owner", "group", "others", "short", "empty", "long"],
)
def test_a_file_that_is_not_ours_or_not_whole_is_removed(
    change: Callable[[Path], None], error: type[Exception], store: DirectoryStore
) -> None:
    write(store, 1)
    change(file(store, 1))
    with pytest.raises(error):
        is_right(store, 1)
    assert not os.path.lexists(file(store, 1))
    assert write(store, 1)
    assert is_right(store, 1)


def test_a_folder_in_the_place_of_a_file_is_left_alone(store: DirectoryStore) -> None:
    write(store, 1)
    file(store, 1).unlink()
    file(store, 1).mkdir()
    assert store.find([key(1)]) == 0
    with pytest.raises(PermissionError):
        is_right(store, 1)
    with pytest.raises(OSError):
        write(store, 1)
    assert [one.name for one in file(store, 1).parent.iterdir()] == [file(store, 1).name]


@pytest.mark.parametrize("place", [lambda path: path.parent, lambda path: path.parents[1]], ids=["keys", "namespace"])
def test_nothing_is_written_to_a_folder_of_others(place: Callable[[Path], Path], store: DirectoryStore) -> None:
    folder = place(file(store, 1))
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="only this user can write"):
        store._make(str(file(store, 1).parent))
    folder.rmdir()
    folder.symlink_to(folder.parent)
    with pytest.raises(PermissionError, match="only this user can write"):
        store._make(str(file(store, 1).parent))


def test_a_directory_that_is_removed_is_made_again(store: DirectoryStore, tmp_path: Path) -> None:
    write(store, 1)
    shutil.rmtree(tmp_path / "kv")
    assert store.find([key(1)]) == 0
    assert not is_right(store, 1)
    assert write(store, 2)
    assert is_right(store, 2)
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").write_text("a file in its place")
    assert store.find([key(2)]) == 0
    assert not is_right(store, 2)
    with pytest.raises(OSError):
        write(store, 3)


def test_a_full_disk_becomes_the_bound(disk: Path) -> None:
    """Otherwise nothing new would ever be kept."""
    store = DirectoryStore(disk, NAMESPACE, ROOM)
    size, number = 2**16, 0
    with pytest.raises(OSError) as raised:
        for number in range(100):
            write(store, number, size)
    assert raised.value.errno == errno.ENOSPC
    assert 5 < number <= 16
    for later in range(number, 100):
        assert write(store, later, size)
        assert is_right(store, later, size)
    assert not list(disk.rglob("*.part"))
    assert store.num_bytes <= 2**20


def test_the_bound_of_a_disk_that_was_full_comes_back(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = disk / "other"
    other.write_bytes(bytes(2**20 - 2**14))
    store = DirectoryStore(disk / "kv", NAMESPACE, ROOM)
    for _ in range(2):
        with pytest.raises(OSError, match=r"tier's size|No space"):
            write(store, 1, 2**16)
    other.unlink()
    monkeypatch.setattr(directory, "_SHRUNK_SECONDS", 0.0)
    store._shrunk_until = 0.0
    assert write(store, 1, 2**16) and is_right(store, 1, 2**16)


def test_a_disk_that_can_only_be_read_is_read(disk: Path) -> None:
    store = DirectoryStore(disk, NAMESPACE, ROOM)
    write(store, 1)
    os.utime(file(store, 1), (1, 1))
    can_only_be_read(disk)
    assert is_right(store, 1)
    with pytest.raises(OSError) as raised:
        write(store, 2)
    assert raised.value.errno == errno.EROFS
    store.drop(key(1))


def open_files() -> set[tuple[str, str]]:
    """Descriptors of this process, each with its file."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.mark.parametrize("call", ["open", "preadv", "writev", "replace", "close"])
def test_any_call_can_fail(call: str, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and leaves neither descriptors nor unfinished files."""
    write(store, 1)
    gc.collect()  # what other tests have left behind would close descriptors later
    before = open_files()
    real: Any = getattr(os, call)

    def fails(*arguments: Any, **options: Any) -> Any:
        if call == "close":
            real(*arguments)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(directory.os, call, fails)
        attempts = {"read": lambda: is_right(store, 1), "write": lambda: write(store, 2)}
        for name in {"preadv": ["read"], "writev": ["write"], "replace": ["write"]}.get(call, ["read", "write"]):
            with pytest.raises(OSError, match="Input/output"):
                attempts[name]()
    assert not open_files() - before
    assert not list(store._path.rglob("*.part"))
    assert is_right(store, 1)
    assert not is_right(store, 2)


def test_calls_can_do_a_part_of_their_work(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any byte."""
    parts = iter([1, 7, 4096, 100_000] * 10_000)

    def some(buffers: list[memoryview]) -> list[memoryview]:
        left, cut = next(parts), []
        for buffer in buffers:
            cut.append(buffer[:left])
            left -= cut[-1].nbytes
        return cut

    preadv, writev = os.preadv, os.writev
    monkeypatch.setattr(directory.os, "preadv", lambda fd, buffers, at: preadv(fd, some(buffers), at))
    monkeypatch.setattr(directory.os, "writev", lambda fd, buffers: writev(fd, some(buffers)))
    assert write(store, 1)
    assert is_right(store, 1)


def test_a_file_that_is_cut_while_it_is_read_is_no_hit(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, 1)
    preadv = os.preadv

    def cut(fd: int, buffers: list[memoryview], at: int) -> int:
        os.truncate(file(store, 1), 100)
        return preadv(fd, buffers, at)

    monkeypatch.setattr(directory.os, "preadv", cut)
    with pytest.raises(TornError, match="ended at"):
        is_right(store, 1)


def test_what_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, NAMESPACE, 10 * SIZE)
    for number in range(8):
        write(store, number)
        os.utime(file(store, number), (number, 1))
    assert is_right(store, 0), "which makes it the one that was used last"
    for number in range(8, 12):
        write(store, number)
        os.utime(file(store, number), (1000 + number, 1))
    assert [number for number in range(12) if is_right(store, number)] == [0, *range(3, 12)]


def test_the_bound_is_that_of_all_engines_and_namespaces(tmp_path: Path) -> None:
    bound = 40 * SIZE
    stores = [DirectoryStore(tmp_path, name * 16, bound) for name in ("0f", "f0", "aa")]
    for number in range(200):
        write(stores[number % 3], number)
        if number % 9 == 0:
            used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
            assert used <= bound + 2 * SIZE, "each may have written 1 / 32 since it last looked"
    assert used > bound / 2
    with pytest.raises(OSError, match="the tier's size is"):
        write(stores[0], 1000, bound + 1)


def test_others_files_are_not_evicted(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / NAMESPACE / "0f").mkdir(parents=True)
    for name in ("readme", "notes/a", f"{NAMESPACE}/x", f"{NAMESPACE}/0f/x"):
        (tmp_path / name).write_bytes(bytes(1000))
    (tmp_path / NAMESPACE / "0e").symlink_to(tmp_path / "notes")
    assert evict(tmp_path, 100, 100) == 0
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 5


def test_leftovers_of_killed_writers_go(tmp_path: Path) -> None:
    folder = tmp_path / NAMESPACE / "0f"
    folder.mkdir(parents=True)
    for name, age in ((".old.1.1.part", 1), (".young.1.1.part", None)):
        (folder / name).write_bytes(b"half")
        if age is not None:
            os.utime(folder / name, (age, age))
    evict(tmp_path, ROOM, 0)
    assert [path.name for path in folder.iterdir()] == [".young.1.1.part"]


def in_a_child(work: Callable[[], None]) -> int:
    """The id of a process that does this."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    return pid


@pytest.mark.parametrize("writers", nightly_but([40], [40, 400]))
def test_of_a_killed_writer_whole_files_are_left(writers: int, tmp_path: Path) -> None:
    """Each is killed some way into a loop of writes and replacements."""
    store = DirectoryStore(tmp_path, NAMESPACE, ROOM)
    told, tells = os.pipe()

    def writes() -> None:
        own = DirectoryStore(tmp_path, NAMESPACE, ROOM)
        while True:
            for number in range(5):
                own.drop(key(number))
                write(own, number)
                os.write(tells, b".")

    present = 0
    for round_ in range(writers):
        writer = in_a_child(writes)
        for _ in range(1 + round_ % 7):
            os.read(told, 1)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        present += sum([is_right(store, number) for number in range(5)])
    assert present > writers
    for path in tmp_path.rglob("*.part"):
        os.utime(path, (1, 1))
    evict(tmp_path, ROOM, 0)
    assert not list(tmp_path.rglob("*.part"))
    os.close(told)
    os.close(tells)


def killed_at(moment: int, folder: Path) -> bool:
    """Whether a process that stores ten extents was killed before its call number `moment`, of all that write."""

    def writes() -> None:
        calls = itertools.count()

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def counts(*arguments: Any, **options: Any) -> Any:
                if next(calls) == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            return counts

        writev = os.writev
        directory.os.writev = counted(lambda fd, buffers: writev(fd, [buffers[0][:PIECE]]))  # type: ignore[misc]
        for name in ("open", "mkdir", "replace", "unlink", "stat"):
            setattr(directory.os, name, counted(getattr(os, name)))
        own = DirectoryStore(folder, NAMESPACE, ROOM)
        for number in range(10):
            write(own, number)

    return os.WIFSIGNALED(os.waitpid(in_a_child(writes), 0)[1])


@pytest.mark.nightly
def test_a_writer_is_killed_at_every_call(tmp_path: Path) -> None:
    """It leaves whole files and at most one unfinished one, and does not hold up the next writer."""
    moment = 0
    while killed_at(moment, tmp_path / str(moment)):
        folder = tmp_path / str(moment)
        store = DirectoryStore(folder, NAMESPACE, ROOM)
        present = [is_right(store, number) for number in range(10)]
        assert present == sorted(present, reverse=True), "they are written one after the other"
        assert all(write(store, number) and is_right(store, number) for number in range(10))
        parts = list(folder.rglob("*.part"))
        assert len(parts) <= 1
        for path in parts:
            os.utime(path, (1, 1))
        evict(folder, ROOM, 0)
        assert not list(folder.rglob("*.part"))
        moment += 1
    assert moment >= 200


def test_one_engine_reads_while_another_evicts(tmp_path: Path) -> None:
    """The reader finds whole files or none."""
    reader = DirectoryStore(tmp_path, NAMESPACE, 6 * SIZE)

    def writes() -> None:
        own = DirectoryStore(tmp_path, NAMESPACE, 6 * SIZE)
        for number in range(400):
            write(own, number % 20)

    writer = in_a_child(writes)
    found = 0
    while not os.waitpid(writer, os.WNOHANG)[0]:
        found += sum([is_right(reader, number) for number in range(20)])
    assert found
