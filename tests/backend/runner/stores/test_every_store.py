"""Every KV store gives back what it was given, or nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from extents import blank, content, frames_of, key
from kv_memory import MemoryStore
from lmcache_rig import LMCacheServer
from peer_rig import PeerRig
from redis_rig import RedisServer, needs_redis

from inflight.engine.tiers.base import Frames, KVStore, TornError
from inflight.runner.stores.directory import DirectoryStore
from inflight.runner.stores.host import HostStore
from inflight.runner.stores.lmcache_store import LMCacheStore
from inflight.runner.stores.peer_store import PeerStore
from inflight.runner.stores.redis_store import RedisStore

SIZE = 10_000
NAMESPACE, OTHER = "0f" * 16, "f0" * 16


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def lmcache_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    with LMCacheServer(tmp_path_factory.mktemp("lmcache")) as server:
        yield server


class WrittenPeer(PeerStore):
    """A peer whose engine stores as the test says."""

    def __init__(self) -> None:
        self._rig = PeerRig(bytes.fromhex(NAMESPACE))
        super().__init__("127.0.0.1", self._rig.port, bytes.fromhex(NAMESPACE), b"")

    def store(self, key: bytes, frames: Frames) -> bool:
        return self._rig.host.store(key, frames)

    def drop(self, key: bytes) -> None:
        self._rig.host.drop(key)

    def close(self) -> None:
        super().close()
        self._rig.close()


@pytest.fixture(params=["definition", "host", "disk", "lmcache", "peer", pytest.param("redis", marks=needs_redis)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        server.flush()
        made: KVStore = RedisStore(server.url, NAMESPACE)
    elif request.param == "lmcache":
        made = LMCacheStore(request.getfixturevalue("lmcache_server").url, secrets.token_hex(16))
    elif request.param == "peer":
        made = WrittenPeer()
    elif request.param == "disk":
        made = DirectoryStore(tmp_path / "kv", NAMESPACE, 2**30)
    else:
        made = HostStore(2**30) if request.param == "host" else MemoryStore()
    yield made
    made.close()


def test_gives_back_what_it_was_given(store: KVStore) -> None:
    data = content(1, SIZE)
    assert store.store(key(1), frames_of(data))
    for count in (1, 5, 7, 3000):  # more buffers than one system call takes
        memory, frames = blank(SIZE, count)
        assert store.load(key(1), frames)
        assert memory == data


def test_has_not_what_it_was_not_given(store: KVStore) -> None:
    memory, frames = blank(SIZE)
    assert not store.load(key(1), frames)
    assert memory == bytes(SIZE)
    store.drop(key(1))
    assert store.find([]) == store.first_of([]) == 0


def test_finds_the_leading_ones(store: KVStore) -> None:
    for number in (1, 2, 4):
        store.store(key(number), frames_of(content(number, 100)))
    assert store.find([key(number) for number in (1, 2, 3, 4)]) == 2
    assert store.find([key(3), key(1)]) == 0
    assert store.find([key(4), key(2)]) == 2
    store.drop(key(1))
    assert store.find([key(1), key(2)]) == 0
    assert not store.load(key(1), blank(100)[1])


def test_finds_the_first_one_that_it_has(store: KVStore) -> None:
    for number in (2, 4):
        store.store(key(number), frames_of(content(number, 100)))
    assert store.first_of([key(number) for number in (1, 2, 3, 4)]) == 1
    assert store.first_of([key(4), key(1)]) == 0
    assert store.first_of([key(1), key(3)]) == 2
    store.drop(key(2))
    assert store.first_of([key(number) for number in (1, 2, 3, 4)]) == 3


def test_another_size_is_torn(store: KVStore) -> None:
    for size in (SIZE - 1, SIZE + 1):
        store.store(key(1), frames_of(content(1, SIZE)))
        with pytest.raises(TornError):
            store.load(key(1), blank(size)[1])


def test_an_extent_can_be_stored_again(store: KVStore) -> None:
    store.store(key(1), frames_of(content(1, SIZE)))
    store.drop(key(1))
    store.store(key(1), frames_of(content(2, SIZE)))
    memory, frames = blank(SIZE)
    assert store.load(key(1), frames)
    assert memory == content(2, SIZE)


def test_host_memory_is_bounded_and_keeps_what_was_used_last() -> None:
    store = HostStore(5 * SIZE)
    for number in range(5):
        store.store(key(number), frames_of(content(number, SIZE)))
    assert store.load(key(0), blank(SIZE)[1])
    store.store(key(5), frames_of(content(5, SIZE)))
    store.store(key(6), frames_of(content(6, 2 * SIZE)))
    assert [number for number in range(7) if store.find([key(number)])] == [0, 4, 5, 6]
    assert store.num_bytes == 5 * SIZE
    store.store(key(6), frames_of(content(6, SIZE)))
    assert store.num_bytes == 4 * SIZE
    with pytest.raises(OSError, match="the tier's size is"):
        store.store(key(7), frames_of(content(7, 5 * SIZE + 1)))
    store.close()
    assert store.num_bytes == 0


def test_namespaces_do_not_meet(tmp_path: Path) -> None:
    mine, other = (DirectoryStore(tmp_path, name, 2**30) for name in (NAMESPACE, OTHER))
    mine.store(key(1), frames_of(content(1, SIZE)))
    assert other.find([key(1)]) == 0
    assert not other.load(key(1), blank(SIZE)[1])


@needs_redis
def test_namespaces_do_not_meet_in_redis(redis_server: RedisServer) -> None:
    mine, other = (RedisStore(redis_server.url, name) for name in (NAMESPACE, OTHER))
    mine.store(key(1), frames_of(content(1, SIZE)))
    assert other.find([key(1)]) == 0
    assert not other.load(key(1), blank(SIZE)[1])


def test_namespaces_do_not_meet_in_lmcache(lmcache_server: LMCacheServer) -> None:
    mine, other = (LMCacheStore(lmcache_server.url, secrets.token_hex(16)) for _ in range(2))
    mine.store(key(1), frames_of(content(1, SIZE)))
    assert other.find([key(1)]) == 0
    assert not other.load(key(1), blank(SIZE)[1])
    assert mine.find([key(1)]) == 1
    mine.close()
    other.close()
