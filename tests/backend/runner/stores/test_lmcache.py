"""An LMCache server that is full, stopped, killed, started again, damaged, or answers something else."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from extents import blank, content, frames_of, key
from lmcache_rig import LMCacheServer

from inflight.config import ConfigError
from inflight.engine.tiers.base import TornError
from inflight.engine.tiers.seal import Seal
from inflight.engine.tiers.tier import Tier
from inflight.kv_tiers_config import KVTier
from inflight.runner.stores.lmcache_store import LMCacheStore
from inflight.runner.stores.lmcache_wire import CHUNK_BYTES, Operation, Request
from inflight.runner.stores.make_store import make_store
from inflight.runner.tier_threads import TierThreads

NAMESPACE = "0f" * 16
SIZE = 2**20
SECONDS = 30.0
SILENT_SECONDS = 0.3  # for a call that gets no answer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LMCacheServer]:
    with LMCacheServer(tmp_path) as server:
        yield server


@pytest.fixture
def store(server: LMCacheServer) -> Iterator[LMCacheStore]:
    store = LMCacheStore(server.url, NAMESPACE, SECONDS)
    yield store
    store.close()


def is_right(store: LMCacheStore, number: int) -> bool:
    memory, frames = blank(SIZE)
    loaded = store.load(key(number), frames)
    assert not loaded or memory == content(number, SIZE)
    return loaded


def test_a_server_that_stops_times_out_and_goes_on(server: LMCacheServer, store: LMCacheStore) -> None:
    store.store(key(1), frames_of(content(1, SIZE)))
    server.stop()
    store._seconds = SILENT_SECONDS
    calls: list[Callable[[], Any]] = [
        lambda: store.find([key(1)]),
        lambda: store.first_of([key(1)]),
        lambda: is_right(store, 1),
        lambda: store.store(key(2), frames_of(content(2, SIZE))),
    ]
    for call in calls:
        with pytest.raises(TimeoutError, match="LMCache did not answer"):
            call()
    server.go_on()
    store._seconds = SECONDS
    assert is_right(store, 1), "and no answer to an earlier question"
    assert store.find([key(1), key(3)]) == 1
    assert store.store(key(2), frames_of(content(2, SIZE)))
    assert is_right(store, 2)


def test_a_server_that_is_killed_is_found_again(server: LMCacheServer, store: LMCacheStore, tmp_path: Path) -> None:
    store.store(key(1), frames_of(content(1, SIZE)))
    server.kill()
    store._seconds = SILENT_SECONDS
    for call in (lambda: store.find([key(1)]), lambda: is_right(store, 1)):
        with pytest.raises(TimeoutError):
            call()
    with LMCacheServer(tmp_path, port=server.port):
        store._seconds = SECONDS
        assert not is_right(store, 1)
        assert store.store(key(1), frames_of(content(1, SIZE)))
        assert is_right(store, 1)


def test_a_server_that_starts_anew_under_a_store_is_found_again(
    server: LMCacheServer, store: LMCacheStore, tmp_path: Path
) -> None:
    store.store(key(1), frames_of(content(1, SIZE)))
    server.kill()
    with LMCacheServer(tmp_path, port=server.port):
        store._seconds = SILENT_SECONDS
        with contextlib.suppress(TimeoutError):  # the new server does not know us, and is silent
            store.store(key(2), frames_of(content(2, SIZE)))
        store._seconds = SECONDS
        assert store.store(key(2), frames_of(content(2, SIZE)))
        assert is_right(store, 2)
        assert not is_right(store, 1)


def test_what_was_not_used_for_longest_goes_first(store: LMCacheStore) -> None:
    # 64 MiB have room for less than 57.  The real server makes room now and then, and does not store until it has.
    stored = [store.store(key(number), frames_of(content(number, SIZE))) for number in range(75)]
    assert sum(stored) > 40
    has = [number for number in range(75) if is_right(store, number)]
    assert 0 < len(has) < 64
    assert 0 not in has


def test_one_flipped_byte_is_a_miss_and_the_extent_is_kept_again(server: LMCacheServer) -> None:
    seal = Seal(bytes.fromhex(NAMESPACE))
    tier, other = (Tier("lmcache", LMCacheStore(server.url, NAMESPACE, 30), seal, TierThreads) for _ in range(2))
    with contextlib.ExitStack() as stack:
        for one in (tier, other):
            stack.callback(one.close, 30)
        for number, place in enumerate((20, CHUNK_BYTES + 5, SIZE - 1)):  # in the seal, a block, the last object
            data = content(number, SIZE)
            keep(tier, number)
            assert loaded(tier, number) == data
            flip(server.memory, (seal.made(key(number), frames_of(data)) + data)[place : place + 64])
            assert loaded(tier, number) is None
            assert tier.errors == {"corrupt": number + 1}
            assert tier.find([key(number)]).result(30) == (0, None), "it cannot be removed, but is not found again"
            keep(tier, number)
            assert loaded(tier, number) == data
            assert loaded(other, number) is None, "which finds the damaged one"
            assert loaded(other, number) == data


def loaded(tier: Tier, number: int) -> bytes | None:
    memory, frames = blank(SIZE)
    return bytes(memory) if tier.load(key(number), lambda read: read(frames)).result(30) else None


def keep(tier: Tier, number: int) -> None:
    stored = threading.Event()
    frames = frames_of(content(number, SIZE))
    tier.store(key(number), lambda: frames)
    tier._writes.submit(stored.set)
    assert stored.wait(30)


def flip(path: Path, near: bytes) -> None:
    """One bit of all places that have these bytes."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at, count = memory.find(near), 0
        while at >= 0:
            memory[at] ^= 1
            at, count = memory.find(near, at + 1), count + 1
    assert count


def test_an_extent_of_another_size_is_replaced(store: LMCacheStore) -> None:
    store.store(key(1), frames_of(content(1, SIZE)))
    with pytest.raises(TornError, match=f"{SIZE} bytes, and {SIZE - 1} were expected"):
        store.load(key(1), blank(SIZE - 1)[1])
    assert not is_right(store, 1)
    store.store(key(1), frames_of(content(1, SIZE - 1)))
    memory, frames = blank(SIZE - 1)
    assert store.load(key(1), frames)
    assert memory == content(1, SIZE - 1)


def test_threads_have_connections_of_their_own(server: LMCacheServer) -> None:
    store, failed = LMCacheStore(server.url, NAMESPACE, 30), list[BaseException]()

    def work(first: int) -> None:
        try:
            for number in [*range(first, first + 5), 100]:
                store.store(key(number), frames_of(content(number, SIZE)))
                assert is_right(store, number)
            assert store.find([key(number) for number in range(first, first + 5)]) == 5
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(5 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert not failed


def test_of_two_that_write_the_same_one_has_it_and_neither_fails(server: LMCacheServer) -> None:
    """The first has begun and not ended: then the object can be neither written nor read."""
    mine, other = (LMCacheStore(server.url, NAMESPACE, 30) for _ in range(2))
    tokens = [*key(1), 0] + [0] * (256 * 9 - 17)
    with other._connection() as connection:
        begun = [connection.key(tokens, 0, "another"), connection.instance]
        connection.ask([Request(Operation.PREPARE_STORE, begun)])
        assert not mine.store(key(1), frames_of(content(1, SIZE)))
        assert not is_right(mine, 1)
        assert mine.find([key(1)]) == 0
        connection.ask([Request(Operation.COMMIT_STORE, [*begun, b""])])
    with pytest.raises(TornError):  # nothing was written into its memory
        is_right(mine, 1)
    assert mine.store(key(1), frames_of(content(1, SIZE)))
    assert is_right(mine, 1)
    mine.close()
    other.close()


def test_many_keys_are_looked_up_in_parts(server: LMCacheServer) -> None:
    store = LMCacheStore(server.url, NAMESPACE, 30)
    for number in range(70):
        store.store(key(number), frames_of(content(number, 100)))
    keys = [key(number) for number in range(75)]
    assert store.find(keys) == 70
    assert store.first_of([*reversed(keys[70:]), *(key(1000 + number) for number in range(40)), key(3)]) == 45
    store.close()


REGISTERED = {"shm_name": "", "pool_size": 0}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (REGISTERED, "start it with --supported-transfer-mode engine_driven --shm-name NAME"),
        (
            REGISTERED | {"shm_name": "inflight_not_here", "pool_size": 1},
            "it must run on this machine and share /dev/shm",
        ),
        (REGISTERED | {"shm_name": "../../etc/passwd", "pool_size": 1}, "shares no memory"),
        ({"pool_size": "much"}, "not one of version 0.5"),
        (7, "not one of version 0.5"),
        (None, "not one of version 0.5"),
    ],
)
def test_what_answers_something_else_is_an_error_that_says_so(answer: object, why: str) -> None:
    with OtherServer(answer) as url:
        store = LMCacheStore(url, NAMESPACE, 30)
        with pytest.raises(OSError, match=why) as raised:
            store.find([key(1)])
        assert raised.value.errno == errno.EIO
        store.close()


def test_places_outside_the_shared_memory_are_not_touched() -> None:
    name = f"inflight_test_other_{os.getpid()}"
    path = Path(f"/dev/shm/{name}")
    path.write_bytes(bytes(2 * CHUNK_BYTES))
    try:
        for offset, length in (
            (-1, CHUNK_BYTES),
            (CHUNK_BYTES + 1, CHUNK_BYTES),
            (0, CHUNK_BYTES - 1),
            (2**62, CHUNK_BYTES),
        ):
            slots = [{"offset": offset, "length": length}]
            answers = {16: {"context": {"slots": slots, "chunk_indices": [0]}}}
            with OtherServer({"shm_name": name, "pool_size": 2**40}, answers) as url:
                store = LMCacheStore(url, NAMESPACE, 30)
                with pytest.raises(OSError, match="places that are not in"):
                    store.store(key(1), frames_of(content(1, 100)))
                store.close()
        assert path.read_bytes() == bytes(2 * CHUNK_BYTES)
    finally:
        path.unlink()


class OtherServer:
    """Answers each operation with what it was given, in place of what LMCache would."""

    def __init__(self, registered: object, answers: dict[int, object] | None = None) -> None:
        self._answers = {14: registered, 21: 256, **(answers or {})}

    def __enter__(self) -> str:
        self._context, self._ends = zmq.Context(), threading.Event()
        socket = self._context.socket(zmq.ROUTER)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        self._thread = threading.Thread(target=self._serve, args=(socket,))
        self._thread.start()
        return f"tcp://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._context.term()

    def _serve(self, socket: Any) -> None:
        while not self._ends.is_set():
            if socket.poll(20):
                peer, number, operation, *_ = socket.recv_multipart()
                answer = self._answers.get(msgspec.msgpack.decode(operation))
                socket.send_multipart([peer, number, operation, msgspec.msgpack.encode(answer)])
        socket.close(0)


def test_the_package_is_asked_for_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"triton-inflight\[lmcache\]"):
        make_store(KVTier(type="lmcache", url="tcp://127.0.0.1:5555"), NAMESPACE)
