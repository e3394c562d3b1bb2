"""The engines at all addresses of a host name; some are dead or silent, or evict."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Iterator, Sequence

import pytest
from extents import blank, content, frames_of, key
from peer_rig import NAMESPACE, SIZE, PeerRig
from redis_rig import free_port

from inflight.kv_tiers_config import KVTier
from inflight.runner.stores import named_peers
from inflight.runner.stores.make_store import make_store
from inflight.runner.stores.named_peers import NamedPeers
from inflight.runner.stores.peer_store import PeerStore

NAME = "prompts.example"


class Pods:
    """Engines at 127.0.0.1, 127.0.0.2 and so on, and a name for them.

    Attributes:
        addresses: that the name has; an exception: it cannot be resolved.
        now: of the store's clock.
    """

    def __init__(self, count: int, seconds: float = 30.0) -> None:
        self.port, self.now, self.questions = free_port(), 0.0, 0
        self.addresses: list[str] | OSError = [f"127.0.0.{number + 1}" for number in range(count)]
        self.rigs = [PeerRig(port=self.port, address=address) for address in self.addresses]
        self.store = NamedPeers(NAME, self.port, NAMESPACE, b"", seconds, self._look_up, lambda: self.now)

    def _look_up(self, host: str) -> Sequence[str]:
        assert host == NAME
        self.questions += 1
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses

    def put(self, rig: int, *numbers: int) -> None:
        for number in numbers:
            self.rigs[rig].host.store(key(number), frames_of(content(number, SIZE)))

    def loads(self, number: int) -> bool:
        memory, frames = blank(SIZE)
        found = self.store.load(key(number), frames)
        assert not found or memory == content(number, SIZE)
        return found

    def close(self) -> None:
        self.store.close()
        for rig in self.rigs:
            rig.close()


@contextlib.contextmanager
def pods(count: int, seconds: float = 30.0) -> Iterator[Pods]:
    made = Pods(count, seconds)
    try:
        yield made
    finally:
        made.close()


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def test_the_longest_prefix_counts_and_is_read_where_it_is() -> None:
    with pods(3) as made:
        made.put(0, 1)
        made.put(1, 1, 2, 3)
        made.put(2, 7, 9)
        assert made.store.find(keys(1, 2, 3, 4)) == 3
        assert made.store.find(keys(7, 8)) == 1
        assert made.store.find(keys(5)) == 0
        assert made.store.first_of(keys(4, 9, 3)) == 1
        assert made.store.first_of(keys(5, 6)) == 2
        assert [made.loads(number) for number in (1, 2, 3, 7, 9, 5)] == [True] * 5 + [False]


def test_an_engine_that_has_evicted_it_leaves_it_to_the_others() -> None:
    with pods(2) as made:
        made.put(0, 1)
        assert made.store.find(keys(1)) == 1
        made.rigs[0].host.drop(key(1))
        assert not made.loads(1)
        made.put(1, 1)
        assert made.loads(1)


def test_an_extent_that_one_engine_has_damaged_is_read_from_another() -> None:
    with pods(3) as made:
        for number in range(3):
            made.put(number, 1)
        damaged = made.rigs[0].host
        damaged.store(key(1), frames_of(content(2, SIZE)))
        assert made.store.find(keys(1)) == 1
        memory, frames = blank(SIZE)
        assert made.store.load(key(1), frames) and memory != content(1, SIZE)
        made.store.drop(key(1))  # as the tier does
        assert made.loads(1)
        assert damaged.find(keys(1)) == 1, "it is the other engine's"


def test_a_dead_engine_rests_and_the_others_are_read(caplog: pytest.LogCaptureFixture) -> None:
    with pods(2) as made, caplog.at_level(logging.WARNING):
        made.put(0, 1)
        made.put(1, 1, 2)
        made.rigs[0].close()
        for _ in range(5):
            assert made.store.find(keys(1, 2)) == 2
            assert made.loads(2)
        (said,) = caplog.messages
        assert said.startswith(f"KV tier peer: an engine of {NAME} is left alone for 1 s: ") and "127.0.0.1" in said
        made.now += 1.5
        assert made.store.find(keys(1, 2, 3)) == 2
        assert "for 2 s" in caplog.messages[-1]
        made.rigs[0] = PeerRig(port=made.port, address="127.0.0.1")
        made.put(0, 1, 2, 3)
        assert made.store.find(keys(1, 2, 3)) == 2, "it rests"
        made.now += 2.5
        assert made.store.find(keys(1, 2, 3)) == 3 and made.loads(3)


def test_a_silent_engine_costs_its_time_once() -> None:
    with pods(1, seconds=0.05) as made, socket.socket() as silent:
        silent.bind(("127.0.0.2", made.port))
        silent.listen()
        made.addresses = ["127.0.0.1", "127.0.0.2"]
        made.put(0, 1)
        assert made.store.find(keys(1, 2)) == 1
        assert [peer.failures for peer in made.store._peers] == [0, 1]
        assert made.store.find(keys(1, 2)) == 1 and made.loads(1)
        assert [peer.failures for peer in made.store._peers] == [0, 1], "it was asked again"


def test_if_none_answers_the_store_fails() -> None:
    with pods(2) as made:
        for rig in made.rigs:
            rig.close()
        for ask in (made.store.find, made.store.first_of):
            with pytest.raises(OSError, match=r"the engine at 127\.0\.0\."):
                ask(keys(1))
        with pytest.raises(OSError, match=r"the engine at 127\.0\.0\."):
            made.loads(1)


def test_engines_come_and_go_with_the_names_addresses(caplog: pytest.LogCaptureFixture) -> None:
    with pods(2) as made:
        made.put(0, 1)
        made.put(1, 1, 2)
        made.addresses = ["127.0.0.1"]
        assert made.store.find(keys(1, 2)) == 1
        made.addresses = ["127.0.0.1", "127.0.0.2"]
        assert made.store.find(keys(1, 2)) == 1 and made.questions == 1
        made.now += 5.0
        assert made.store.find(keys(1, 2)) == 2 and made.loads(2)
        gone = made.store._peers[1].store
        made.addresses = ["127.0.0.1"]
        made.now += 5.0
        assert made.store.find(keys(1, 2)) == 1 and not made.loads(2)
        assert gone._is_closed and not gone._idle
        made.addresses = OSError(errno.EHOSTUNREACH, "the name is away")
        made.now += 5.0
        assert made.store.find(keys(1, 2)) == 1
        assert "the engines that it named are read further" in caplog.messages[-1]


def test_a_name_without_addresses_is_an_error_until_it_has_some() -> None:
    with pods(1) as made:
        made.put(0, 1)
        given, made.addresses = made.addresses, OSError(errno.EHOSTUNREACH, "the name is away")
        for _ in range(2):
            with pytest.raises(OSError, match="the name is away"):
                made.store.find(keys(1))
        made.addresses = given
        assert made.store.find(keys(1)) == 1


def test_no_more_than_16_engines(caplog: pytest.LogCaptureFixture) -> None:
    with pods(1) as made:
        made.addresses = [f"127.0.0.{number}" for number in range(1, 31)]
        made.put(0, 1)
        for _ in range(3):
            assert made.store.find(keys(1)) == 1
            made.now += 5.0
        assert len(made.store._peers) == 16
        assert caplog.messages.count(f"KV tier peer: {NAME} has 30 addresses; 16 are read") == 1


def test_real_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*_: object, **__: object) -> list[object]:
        of = socket.AF_INET6, socket.AF_INET
        return [
            (of[0], 1, 6, "", ("fd00::2", 0, 0, 0)),
            (of[0], 1, 6, "", ("fd00::1", 0, 0, 0)),
            (of[1], 1, 6, "", ("10.0.0.1", 0)),
        ]

    with pytest.raises(OSError, match=r"the name a\.\.b cannot be resolved"):
        named_peers._addresses("a..b")
    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert named_peers._addresses(NAME) == ["fd00::1", "fd00::2"], "one address of each engine"


@pytest.mark.parametrize(
    ("host", "kind"),
    [("127.0.0.1", PeerStore), ("[::1]", PeerStore), ("localhost", PeerStore), ("prod-kv.llm", NamedPeers)],
)
def test_a_name_is_of_several_engines_and_an_address_is_of_one(host: str, kind: type) -> None:
    store = make_store(KVTier(type="peer", url=f"tcp://{host}:7090"), "0f" * 16)
    assert type(store) is kind
    store.close()
