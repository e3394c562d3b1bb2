"""A Redis server that is full, stopped, killed, started again, or wants a password."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from extents import blank, content, frames_of, key
from redis_rig import RedisServer, needs_redis

from inflight.config import ConfigError, EngineConfig
from inflight.kv_tiers_config import KVTier
from inflight.runner.stores.make_store import make_store
from inflight.runner.stores.redis_store import RedisStore, without_password

pytestmark = needs_redis
NAMESPACE = "0f" * 16
SIZE = 2**20
SECONDS = 60.0
SILENT_SECONDS = 0.2  # for a call that gets no answer
_T = TypeVar("_T")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def is_right(store: RedisStore, number: int) -> bool:
    memory, frames = blank(SIZE)
    loaded = store.load(key(number), frames)
    assert not loaded or memory == content(number, SIZE)
    return loaded


def answered(call: Callable[[], _T]) -> _T:
    """The result of a call; a server that goes on may answer late, and is asked again."""
    while True:
        with contextlib.suppress(TimeoutError):
            return call()


def test_a_server_that_stops_times_out_and_goes_on(server: RedisServer) -> None:
    store = RedisStore(server.url, NAMESPACE, seconds=SILENT_SECONDS)
    answered(lambda: store.store(key(1), frames_of(content(1, SIZE))))
    server.stop()
    for call in (lambda: store.find([key(1)]), lambda: is_right(store, 1), lambda: store.drop(key(2))):
        with pytest.raises(TimeoutError):
            call()
    with pytest.raises(TimeoutError):
        store.store(key(2), frames_of(content(2, 8 * SIZE)))
    server.go_on()
    assert answered(lambda: is_right(store, 1)), "and no answer to an earlier question"
    assert answered(lambda: store.find([key(1), key(3)])) == 1


def test_a_server_that_is_killed_is_found_again(server: RedisServer, tmp_path: Path) -> None:
    store = RedisStore(server.url, NAMESPACE, seconds=SECONDS)
    store.store(key(1), frames_of(content(1, SIZE)))
    server.kill()
    for call in (lambda: store.find([key(1)]), lambda: is_right(store, 1)):
        with pytest.raises(OSError) as raised:
            call()
        assert raised.value.errno == errno.EIO
    with RedisServer(tmp_path, port=server.port):
        assert not is_right(store, 1)
        assert store.store(key(1), frames_of(content(1, SIZE)))
        assert is_right(store, 1)
    store.close()


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_the_server_bounds_its_memory(policy: str, tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", policy) as server:
        store, stored = RedisStore(server.url, NAMESPACE, seconds=SECONDS), 0
        try:
            for number in range(20):
                stored += store.store(key(number), frames_of(content(number, SIZE)))
        except OSError as error:
            assert (policy, error.errno) == ("noeviction", errno.ENOSPC)
            assert "maxmemory-policy" in str(error)
        assert (stored == 20) == (policy == "allkeys-lru")
        assert is_right(store, stored - 1)


def test_a_password_is_in_the_url_or_in_a_file_and_never_in_a_message(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--requirepass", "s3cret") as server:
        address = f"127.0.0.1:{server.port}/0"
        (tmp_path / "password").write_text("s3cret\nmore\n")
        tiers = [
            KVTier(type="redis", url=f"redis://:s3cret@{address}"),
            KVTier(type="redis", url=f"redis://{address}", password_file=str(tmp_path / "password")),
        ]
        for tier in tiers:
            assert make_store(tier, NAMESPACE).find([key(1)]) == 0
        for url in (f"redis://{address}", f"redis://:s3cret-not@{address}"):
            with pytest.raises(OSError) as raised:
                make_store(KVTier(type="redis", url=url), NAMESPACE).find([key(1)])
            assert raised.value.errno == errno.EIO
            assert "s3cret" not in str(raised.value)


def test_what_cannot_be_used_is_refused_at_load(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("another")
    for tier, why in (
        (KVTier(type="redis", url="redis://h:port"), "url is not like"),
        (KVTier(type="redis", url="redis://:s3/cret@h"), "%2F"),
        (KVTier(type="redis", url="redis://h", password_file=str(tmp_path / "none")), "password_file"),
        (KVTier(type="redis", url="redis://:s3@h", password_file=str(secret)), "remove the one in url"),
    ):
        with pytest.raises(ConfigError, match=why) as raised:
            make_store(tier, NAMESPACE)
        assert "s3" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        *("redis://user:s3cret@host/0", "redis://:s3cret@host", "unix:///socket?db=0&password=s3cret"),
        *("default:s3cret@host:6379", "redis://:/s3cret@host"),  # not URLs
    ],
)
def test_messages_about_the_option_have_no_password(url: str) -> None:
    if "://" in url and ":/s" not in url:
        assert "s3cret" not in without_password(url)
    with pytest.raises(ConfigError) as raised:
        EngineConfig.from_dict({"model": "m", "kv_tiers": [{"type": "redis", "url": url, "sise": 3}]})
    assert "s3cret" not in str(raised.value)
    assert "sise" in str(raised.value)
