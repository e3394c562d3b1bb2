"""An engine that is read and is dead, stopped, slow, lying or attacked; and readers that are."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
from extents import blank, content, frames_of, key
from peer_rig import NAMESPACE, SIZE, PeerProcess, PeerRig, readable, wait_until_it_listens
from redis_rig import free_port

from inflight.config import ConfigError
from inflight.engine.tiers.base import TornError
from inflight.engine.tiers.seal import Seal
from inflight.engine.tiers.tier import Tier
from inflight.engine.tiers.tiers import Tiers
from inflight.runner import kv_tiers
from inflight.runner.stores import peer_server, peer_store
from inflight.runner.stores.host import HostStore
from inflight.runner.stores.peer_server import PeerServer
from inflight.runner.stores.peer_store import PeerStore
from inflight.runner.stores.peer_wire import (
    MOST_KEYS,
    Challenge,
    Extent,
    Find,
    Hello,
    Load,
    Position,
    Welcome,
    encoded,
    proof,
)
from inflight.runner.tier_threads import TierThreads

SECRET = b"s" * 32


@pytest.fixture
def rig() -> Iterator[PeerRig]:
    with PeerRig() as rig:
        yield rig


def is_right(store: PeerStore, number: int, size: int = SIZE) -> bool:
    memory, frames = blank(size)
    loaded = store.load(key(number), frames)
    assert not loaded or memory == content(number, size)
    return loaded


def test_more_keys_than_a_question_takes(rig: PeerRig) -> None:
    with readable(rig, 1) as store:
        many = [key(1)] * (MOST_KEYS + 5)
        assert store.find(many) == MOST_KEYS
        assert store.first_of([key(2)] * (MOST_KEYS + 5)) == MOST_KEYS + 5
        assert store.first_of([*[key(2)] * MOST_KEYS, key(1)]) == MOST_KEYS + 1, "as if it had none"


def test_what_is_about_to_be_stored_is_found_and_waited_for(rig: PeerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    with readable(rig) as store:
        rig.coming.add(key(1))
        assert store.find([key(1), key(2)]) == 1
        looks = 0

        def is_coming(asked: bytes) -> bool:
            nonlocal looks
            looks += 1
            if looks == 3:  # the reader waits
                rig.host.store(key(1), frames_of(content(1, SIZE)))
                rig.coming.clear()
            return asked in rig.coming

        monkeypatch.setattr(rig.server, "_is_coming", is_coming)
        assert is_right(store, 1)
        assert looks >= 3


def test_what_never_comes_is_a_miss(rig: PeerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "_COMING_SECONDS", 0.01)
    with readable(rig) as store:
        rig.coming.add(key(1))
        assert not is_right(store, 1)


def test_an_extent_that_is_evicted_while_it_is_sent_is_whole() -> None:
    with PeerRig(max_bytes=2 * SIZE) as rig, readable(rig, 0) as store:
        is_over = threading.Event()

        def evict() -> None:
            number = 1
            while not is_over.is_set():
                rig.host.store(key(number), frames_of(content(number % 2, SIZE)))
                rig.host.store(key(0), frames_of(content(0, SIZE)))
                number += 1

        thread = threading.Thread(target=evict)
        thread.start()
        is_there = [is_right(store, 0) for _ in range(30)]
        is_over.set()
        thread.join()
        assert any(is_there)


@pytest.mark.parametrize(("size", "count"), [(100, 1), (SIZE, 5), (40 * SIZE, 3), (SIZE, 1500)])
def test_an_extent_is_whole_however_much_of_it_is_sent_in_one_call(rig: PeerRig, size: int, count: int) -> None:
    """A call takes 1,024 buffers, and what the reader and the system have room for."""
    rig.host.store(key(1), [memoryview(b""), *frames_of(content(1, size), count)])
    with contextlib.closing(rig.store()) as store:
        for _ in range(3):
            assert is_right(store, 1, size)
        assert not store.load(key(2), blank(size)[1])


def test_a_reader_wakes_up_once_for_the_head_and_the_bytes(rig: PeerRig) -> None:
    """They are sent in one call, where the system has room for them."""
    loop = rig.server._loop
    with readable(rig, 1) as store, mock.patch.object(loop, "sock_sendall", wraps=loop.sock_sendall) as sends:
        rig.host.store(key(2), frames_of(content(2, 2**10)))
        assert is_right(store, 2, 2**10)
        greeting = len(sends.mock_calls)
        assert is_right(store, 2, 2**10)
        assert len(sends.mock_calls) == greeting


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, b""), (b"", SECRET), (SECRET, b"t" * 32)])
def test_another_secret_is_an_error_on_both_sides(ours: bytes, theirs: bytes) -> None:
    with PeerRig(secret=ours) as rig:
        rig.host.store(key(1), frames_of(content(1, SIZE)))
        store = rig.store(secret=theirs)
        with pytest.raises(OSError, match="its kv_store_secret_file is another one"):
            store.find([key(1)])
        store.close()
        store = rig.store(secret=ours)
        assert store.find([key(1)]) == 1
        store.close()


def test_another_namespace_is_a_miss_and_not_asked_again_at_once(rig: PeerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.host.store(key(1), frames_of(content(1, SIZE)))
    store = rig.store(namespace=bytes(16))
    assert (store.find([key(1)]), store.first_of([key(1)]), is_right(store, 1)) == (0, 1, False)
    rig.close()
    assert store.find([key(1)]) == 0
    monkeypatch.setattr(store, "_other_until", float("-inf"))
    with pytest.raises(ConnectionRefusedError):
        store.find([key(1)])


CALLS: list[Callable[[PeerStore], Any]] = [
    lambda store: store.find([key(1)]),
    lambda store: store.first_of([key(1)]),
    lambda store: store.load(key(1), blank(SIZE)[1]),
]


def test_an_engine_that_stops_and_is_killed_and_comes_back() -> None:
    with PeerProcess() as peer:
        seal = Seal(NAMESPACE)
        stores = [PeerStore("127.0.0.1", peer.port, NAMESPACE, b"", 30) for _ in range(2)]
        tier = Tier("peer", stores[0], seal, TierThreads, "none")
        memory, frames = blank(SIZE)
        assert tier.find([key(1), key(99)]).result() == (1, None)
        assert tier.load(key(1), lambda read: read(frames)).result() and memory == content(1, SIZE)
        store = stores[1]
        assert store.find([key(1)]) == 1
        peer.stop()
        for one in stores:
            one._seconds = 0.3
        for call in (*CALLS, *CALLS):  # on a connection of before, then on new ones
            with pytest.raises(TimeoutError, match="did not answer in time"):
                call(store)
        assert tier.find([key(1)]).result() == (0, None)
        assert not tier.load(key(1), lambda read: read(frames)).result()
        peer.go_on()
        store = PeerStore("127.0.0.1", peer.port, NAMESPACE, b"", 30)
        assert store.find([key(1)]) == 1
        peer.kill()
        for call in CALLS:
            with pytest.raises(ConnectionRefusedError):
                call(store)
        assert tier.find([key(1)]).result() == (0, None)
        assert not tier.is_open and tier.errors == {"timeout": 2, "io": 1}
        with PeerProcess(peer.port):
            assert store.find([key(1)]) == 1
        tier.close(1)


def test_connections_that_an_engine_has_closed_are_made_anew(rig: PeerRig) -> None:
    with readable(rig, 1) as store:
        assert store.find([key(1)]) == 1
        rig.close()
        with PeerRig(port=rig.port) as again:
            again.host.store(key(1), frames_of(content(1, SIZE)))
            assert is_right(store, 1)


def received(client: socket.socket, size: int) -> bytes:
    """So many bytes; raises ConnectionError where they end before."""
    data = client.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("the engine has hung up")
    return data


class LyingPeer:
    """Greets as an engine does, then answers each question with `answer`, and hangs up."""

    def __init__(self, answer: bytes, greeting: bytes = b"", secret: bytes = b"", is_same: bool = True) -> None:
        self._answer, self._greeting, self._secret, self._is_same = answer, greeting, secret, is_same
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                try:
                    self._talk(client)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(4096):
                        pass
                except OSError:
                    pass

    def _talk(self, client: socket.socket) -> None:
        if self._greeting:
            client.sendall(self._greeting)
            return
        nonce = bytes(16)
        client.sendall(encoded(Challenge(1, nonce)))
        size = int.from_bytes(received(client, 4), "big")
        hello = msgspec.msgpack.decode(received(client, size), type=Hello)
        mine = proof(self._secret, b"server", nonce + hello.nonce, hello.namespace, self._is_same)
        client.sendall(encoded(Welcome(self._is_same, False, mine)))
        client.recv(1)
        client.sendall(self._answer)

    def store(self, secret: bytes = b"") -> PeerStore:
        return PeerStore("127.0.0.1", self.port, NAMESPACE, secret, 30.0)

    def __enter__(self) -> LyingPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


NONSENSE = [
    b"",
    b"\0\0",
    b"\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"\0\0\0\3abc",
    b"\0\0\0\1\xc0",
    b"\0\0\0\x80" + b"\x91" * 128,
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    encoded(Position(2**40)),
    encoded(Extent(2**40)),
    encoded(Extent(SIZE)) + bytes(SIZE // 2),
    encoded(Find([key(1)])),
]


@pytest.mark.parametrize("answer", NONSENSE)
def test_answers_that_make_no_sense_are_errors_or_misses(answer: bytes) -> None:
    with LyingPeer(answer) as peer:
        store = peer.store()
        for call in CALLS:
            try:
                found = call(store)
            except (OSError, TornError):
                continue
            assert found >= 0  # the tier takes no more than there were
    with LyingPeer(b"", greeting=answer or b"\0") as peer:
        for call in CALLS:
            with pytest.raises(OSError):
                call(peer.store())


def test_a_peer_without_the_secret_is_not_believed() -> None:
    with (
        LyingPeer(encoded(Position(1)), secret=b"t" * 32) as peer,
        pytest.raises(OSError, match="does not have the") as error,
    ):
        peer.store(SECRET).find([key(1)])
    assert error.value.errno == errno.EACCES


@pytest.mark.parametrize("place", [3, 20, 40, 60, 66, 100, SIZE - 1])  # magic, namespace, key, size, sum, blocks
def test_one_flipped_bit_is_a_miss(rig: PeerRig, place: int) -> None:
    seal, data = Seal(NAMESPACE), memoryview(content(1, SIZE))
    whole = bytearray(seal.made(key(1), [data]) + bytes(data))
    whole[place] ^= 4
    rig.host.store(key(1), [memoryview(whole)[:64], memoryview(whole)[64:]])
    tier = Tier("peer", rig.store(), seal, TierThreads, "none")
    _, frames = blank(SIZE)
    assert not tier.load(key(1), lambda read: read(frames)).result()
    assert tier.errors == {"corrupt": 1}
    tier.close(1)


def connected(rig: PeerRig) -> socket.socket:
    return socket.create_connection(("127.0.0.1", rig.port), 30)


def greeted(rig: PeerRig) -> socket.socket:
    client = connected(rig)
    challenge = client.recv(4096)
    nonces = msgspec.msgpack.decode(challenge[4:], type=Challenge).nonce + bytes(16)
    client.sendall(encoded(Hello(NAMESPACE, bytes(16), proof(b"", b"reader", nonces, NAMESPACE))))
    assert client.recv(4096)
    return client


def rest_of(client: socket.socket) -> bytes:
    """The bytes that come until the engine hangs up."""
    found = b""
    try:
        while part := client.recv(4096):
            found += part
    except ConnectionResetError:
        pass
    return found


def test_hostile_bytes_end_only_their_connection(rig: PeerRig) -> None:
    draw = random.Random(1)
    questions = [encoded(Find([key(n) for n in range(9)])), encoded(Load(key(1)))]
    flipped = []
    for question in questions:
        for place in range(len(question)):
            changed = bytearray(question)
            changed[place] ^= 1 << draw.randrange(8)
            flipped.append(bytes(changed))
    garbage = [
        *NONSENSE[2:],
        *flipped,
        *(draw.randbytes(50) for _ in range(20)),
        encoded(Hello(key(1), key(1), bytes(32))),
    ]
    with readable(rig, 1) as store:
        for bytes_ in garbage:
            for client in (connected(rig), greeted(rig)):
                with client:
                    with contextlib.suppress(OSError):  # it has hung up already
                        client.sendall(bytes_)
                        client.shutdown(socket.SHUT_WR)
                    rest_of(client)
            assert store.find([key(1)]) == 1
    assert rig.server._thread.is_alive()


def test_a_silent_stranger_and_a_reader_that_does_not_read_are_hung_up_on(
    rig: PeerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "_GREETING_SECONDS", 0.05)
    monkeypatch.setattr(peer_server, "_SEND_SECONDS", 0.05)
    monkeypatch.setattr(peer_server, "seconds_for", lambda size: 0.0)
    with connected(rig) as client:
        assert len(rest_of(client)) < 100
    with readable(rig, 1) as store:
        monkeypatch.setattr(peer_server, "_GREETING_SECONDS", 30.0)
        with greeted(rig) as client:
            client.settimeout(30)
            try:
                for _ in range(200):
                    client.sendall(encoded(Load(key(1))) * 20)
            except OSError:
                pass
            assert len(rest_of(client)) < 200 * SIZE
        monkeypatch.setattr(peer_server, "_SEND_SECONDS", 30.0)
        assert is_right(store, 1)


def test_a_reader_is_told_that_there_are_too_many(
    rig: PeerRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_server, "_MOST_READERS", 0)
    for _ in range(2):
        with pytest.raises(OSError, match=r"port .* has too many readers"):
            rig.store().find([key(1)])
    assert "0 connections of readers are open, and one more was refused (2 so far)" in caplog.text
    monkeypatch.setattr(peer_server, "_MOST_STRANGERS", 0)
    with pytest.raises(OSError, match="has too many connections that have not greeted"):
        rig.store().find([key(1)])


def test_an_engine_of_other_kv_takes_no_readers_place(rig: PeerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "_MOST_READERS", 1)
    assert rig.store(namespace=bytes(16)).find([key(1)]) == 0
    with readable(rig, 1) as store:
        assert store.find([key(1)]) == 1
        assert rig.store(namespace=bytes(16)).find([key(1)]) == 0, "not too many readers"


def test_the_log_says_when_it_listens(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has the port at first."""
    caplog.set_level("INFO")
    monkeypatch.setattr(peer_server, "_AGAIN_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = PeerServer("127.0.0.1", port, HostStore(SIZE), lambda key: False, NAMESPACE, b"")
        assert f"another process has 127.0.0.1, port {port}; it is tried again" in caplog.text
        assert "others can read" not in caplog.text
    wait_until_it_listens(port)
    server.close()
    assert f"others can read host memory at 127.0.0.1, port {port}" in caplog.text


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "nowhere.invalid"])
def test_an_address_at_which_it_can_never_listen_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_listen: cannot listen on {host}, port 7090: .*; give an address of"):
        PeerServer(host, 7090, HostStore(SIZE), lambda key: False, NAMESPACE, SECRET)


def test_the_port_is_closed_with_the_tiers_though_they_are_still_referred_to() -> None:
    host, port, blocks = HostStore(SIZE), free_port(), mock.Mock(bytes_per_block=SIZE)
    tiers = Tiers([Tier("host", host, Seal(NAMESPACE), TierThreads)], blocks, Seal(NAMESPACE))
    kv_tiers._serve(f"127.0.0.1:{port}", b"", tiers, tiers.tiers[0], host)
    wait_until_it_listens(port)
    tiers.close()
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_a_server_that_its_own_thread_closes_does_not_wait_for_itself(rig: PeerRig) -> None:
    """It had the last reference to its tiers."""
    ended: list[bool] = []

    def close(asked: bytes) -> bool:
        rig.server.close()
        ended.append(True)
        return False

    with readable(rig, 1) as store:
        rig.server._is_coming = close
        with contextlib.suppress(OSError):
            store.find([key(1)])
    rig.server._thread.join(30)
    assert ended == [True] and not rig.server._thread.is_alive()


def test_a_connection_that_ends_as_the_server_does(rig: PeerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    server, failed = rig.server, list[object]()
    monkeypatch.setattr(threading, "excepthook", failed.append)

    def end() -> None:
        task = server._loop.create_task(asyncio.sleep(0))  # done one turn of the loop later than the server
        server._tasks.add(task)
        task.add_done_callback(server._tasks.discard)
        server._main.cancel()

    server._loop.call_soon_threadsafe(end)
    server._thread.join(30)
    assert not server._thread.is_alive() and not failed


def test_too_many_connections_are_hung_up_on(rig: PeerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "_MOST_READERS", 3)
    with readable(rig, 1) as store:
        assert store.find([key(1)]) == 1  # this is one
        clients = [greeted(rig) for _ in range(2)]
        with greeted(rig) as one_more:
            assert rest_of(one_more) == b""
        assert store.find([key(1)]) == 1
        for client in clients:
            client.close()
    monkeypatch.setattr(peer_server, "_MOST_STRANGERS", 2)
    strangers = [connected(rig) for _ in range(20)]
    told = [msgspec.msgpack.decode(client.recv(4096)[4:], type=Challenge).is_full for client in strangers]
    assert sum(told) >= 10
    for client in strangers:
        client.close()


class DribblingPeer(LyingPeer):
    """Sends a byte every hundredth of a second."""

    def _talk(self, client: socket.socket) -> None:
        for _ in range(1000):
            client.sendall(b"\0" if self._answer else b"\1")
            time.sleep(0.01)


def test_an_answer_that_dribbles_has_one_deadline() -> None:
    """Not one for each byte: 0.3 s, and 250 bytes take 2.5 s."""
    with DribblingPeer(b"") as peer, pytest.raises(OSError):
        peer.store().find([key(1)])
    with DribblingPeer(b"") as peer:
        connection = peer_store._Connection.__new__(peer_store._Connection)
        connection._name, connection._deadline = "it", time.monotonic() + 0.3
        connection._socket = socket.create_connection(("127.0.0.1", peer.port))
        with pytest.raises(TimeoutError):
            connection._receive([memoryview(bytearray(250))])
        connection.close()
