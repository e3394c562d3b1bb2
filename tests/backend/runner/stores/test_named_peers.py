"""The engines at all addresses of a host name; some are dead or silent, or evict."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

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
        questions: how often it was looked up.
        may_answer: whether the second look-up and those after it end.
        slow: addresses of engines that take a second of the store's clock, and then do not answer.
        asked: the slow ones that were asked, in order.
    """

    def __init__(self, count: int) -> None:
        self.port, self.now, self.questions = free_port(), 0.0, 0
        self.addresses: list[str] | OSError = [f"127.0.0.{number + 1}" for number in range(count)]
        self.rigs = [PeerRig(port=self.port, address=address) for address in self.addresses]
        self.may_answer, self.slow, self.asked = threading.Event(), set[str](), list[str]()
        self.may_answer.set()
        self.store = NamedPeers(NAME, self.port, NAMESPACE, b"", 1.0, self._look_up, lambda: self.now)
        self.store._make = self._peer  # type: ignore[assignment]

    def _look_up(self, host: str) -> Sequence[str]:
        assert host == NAME
        self.questions += 1
        if self.questions > 1:
            assert self.may_answer.wait(60)
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses

    def _peer(self, address: str) -> PeerStore | Silent:
        if address in self.slow:
            return Silent(self, address)
        return PeerStore(address, self.port, NAMESPACE, b"", 30.0)

    def look_up(self) -> None:
        """As a question does once the addresses are old, and wait until they are known."""
        self.now += 5.0
        self.store._look_up()
        with self.store._looking:
            pass

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


class Silent:
    """The store of an engine that hangs."""

    def __init__(self, pods: Pods, address: str) -> None:
        self.pods, self.address = pods, address

    def find(self, keys: Sequence[bytes]) -> int:
        self.pods.asked.append(self.address)
        self.pods.now += 1.0
        raise TimeoutError(errno.ETIMEDOUT, f"the engine at {self.address} did not answer in time")

    def close(self) -> None:
        pass


@contextlib.contextmanager
def pods(count: int) -> Iterator[Pods]:
    made = Pods(count)
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


@pytest.mark.parametrize("preferred", [[], ["::1"]])
def test_an_extent_that_one_engine_has_damaged_is_read_from_another(preferred: list[str]) -> None:
    """Also where all are read at addresses of the other family."""
    with pods(3) as made:
        made.slow = {*preferred}
        made.addresses = [*preferred, *(f"127.0.0.{number + 1}" for number in range(3))]
        for number in range(3):
            made.put(number, 1)
        damaged = made.rigs[0].host
        damaged.store(key(1), frames_of(content(2, SIZE)))
        assert made.store.find(keys(1)) == (0 if preferred else 1)
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


def test_a_silent_engine_costs_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pods(1) as made, socket.socket() as silent:
        silent.bind(("127.0.0.2", made.port))
        silent.listen()
        made.addresses = ["127.0.0.1", "127.0.0.2"]
        limits = {"127.0.0.1": 30.0, "127.0.0.2": 0.02}
        monkeypatch.setattr(
            made.store, "_make", lambda address: PeerStore(address, made.port, NAMESPACE, b"", limits[address])
        )
        made.put(0, 1)
        assert made.store.find(keys(1, 2)) == 1
        assert [peer.failures for peer in made.store._peers] == [0, 1]
        assert made.store.find(keys(1, 2)) == 1 and made.loads(1)
        assert [peer.failures for peer in made.store._peers] == [0, 1], "it was asked again"


def test_of_several_dead_engines_a_question_asks_one_and_the_others_first() -> None:
    with pods(1) as made:
        made.put(0, 1)
        made.slow = {f"127.0.0.{number}" for number in range(2, 6)}
        made.addresses = sorted({"127.0.0.1", *made.slow})
        for number in range(4):  # a dead one costs a second, and then there is no time for the next one
            assert made.store.find(keys(1, 2)) == 1
            assert len(made.asked) == number + 1
        assert {*made.asked} == made.slow
        made.now += 60.0
        for number in range(8):  # all have rested
            made.asked.clear()
            began = made.now
            assert made.store.find(keys(1, 2)) == 1
            assert len(made.asked) <= 1 and made.now - began < 2.0
            made.now += 60.0 if number == 3 else 0.0


def test_dead_engines_at_first_are_a_miss_until_the_good_one_is_reached() -> None:
    """Errors would have the tier left alone for long."""
    with pods(1) as made:
        made.put(0, 1)
        made.rigs.append(PeerRig(port=made.port, address="127.0.0.9"))
        made.put(1, 1)
        made.slow = {f"127.0.0.{number}" for number in range(2, 6)}
        made.addresses = sorted({"127.0.0.9", *made.slow})
        assert [made.store.find(keys(1, 2)) for _ in range(6)] == [0, 0, 0, 0, 1, 1]
        assert {*made.asked[:4]} == made.slow and len(made.asked) == 6, "then one after the good one"


def test_questions_that_fail_together_count_once(caplog: pytest.LogCaptureFixture) -> None:
    with pods(1) as made, caplog.at_level(logging.WARNING):
        made.put(0, 1)
        made.slow = {"127.0.0.2"}
        made.addresses = ["127.0.0.1", "127.0.0.2"]
        assert made.store.find(keys(1)) == 1
        both = threading.Barrier(3)

        def hang(keys: Sequence[bytes]) -> int:
            both.wait(60)
            raise TimeoutError(errno.ETIMEDOUT, "the engine did not answer in time")

        dead = made.store._peers[1]
        dead.store.find = hang  # type: ignore[method-assign]
        threads = [threading.Thread(target=made.store.find, args=[keys(1, 2)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert dead.failures == 1 and dead.rests_until == made.now + 1.0
        assert len(caplog.messages) == 1
        made.now += 1.0
        dead.store.find = lambda keys: 0  # type: ignore[method-assign]
        assert made.store.find(keys(1, 2)) == 1 and not dead.failures


def test_questions_do_not_wait_for_a_look_up() -> None:
    """Of a name server that hangs: one thread asks it, and it counts from its end."""
    with pods(2) as made:
        made.put(0, 1)
        assert made.store.find(keys(1)) == 1
        made.may_answer.clear()
        made.addresses = ["127.0.0.1"]
        for _ in range(3):
            made.now += 5.0
            assert made.store.find(keys(1, 2)) == 1 and made.loads(1)
        assert made.questions == 2
        assert len(made.store._peers) == 2
        made.may_answer.set()
        with made.store._looking:
            assert len(made.store._peers) == 1
        assert made.store.find(keys(1)) == 1 and made.questions == 2


def test_a_look_up_that_ends_after_the_store_was_closed_leaves_it_closed() -> None:
    with pods(1) as made:
        made.put(0, 1)
        assert made.store.find(keys(1)) == 1
        made.may_answer.clear()
        made.now += 5.0
        made.store._look_up()
        made.store.close()
        made.may_answer.set()
        with made.store._looking:
            assert not made.store._peers
        with pytest.raises(OSError, match="no engine"):
            made.store.find(keys(1))


def test_a_name_server_that_fails_is_left_alone_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with pods(1) as made, caplog.at_level(logging.WARNING):
        made.put(0, 1)
        assert made.store.find(keys(1)) == 1
        good = made.addresses
        for _ in range(2):
            caplog.clear()
            made.addresses = OSError(errno.EHOSTUNREACH, "the name is away")
            for _ in range(3):
                made.look_up()
                asked = made.questions
                assert made.store.find(keys(1)) == 1 and made.questions == asked
            assert caplog.messages == ["KV tier peer: the name is away; the engines that it named are read further"]
            made.addresses = good
            made.look_up()


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
        made.look_up()
        assert made.store.find(keys(1, 2)) == 2 and made.loads(2)
        gone = made.store._peers[1].store
        made.addresses = ["127.0.0.1"]
        made.look_up()
        assert made.store.find(keys(1, 2)) == 1 and not made.loads(2)
        assert gone._is_closed and not gone._idle
        made.addresses = OSError(errno.EHOSTUNREACH, "the name is away")
        made.look_up()
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
            made.look_up()
        assert len(made.store._peers) == 16
        assert caplog.messages.count(f"KV tier peer: {NAME} has 30 addresses; 16 are read") == 1


def answers(*addresses: str) -> Callable[..., list[tuple[object, ...]]]:
    """A name server's, with these addresses."""
    families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
    found = [(family, 1, 6, "", (address, 0)) for family, address in zip(families, addresses)]
    return lambda *_, **__: found  # type: ignore[return-value]


def test_real_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=r"the name a\.\.b cannot be resolved"):
        named_peers._addresses("a..b")
    monkeypatch.setattr(socket, "getaddrinfo", answers("fd00::2", "fd00::1", "10.0.0.1", "fd00::1"))
    assert named_peers._addresses(NAME) == ["fd00::1", "fd00::2", "10.0.0.1"], "the preferred family first"


def test_an_engine_that_listens_on_the_other_family_alone_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on 0.0.0.0 in a cluster with both, where a name has an address of each, and IPv6 comes first."""
    with PeerRig() as rig:
        rig.host.store(key(1), frames_of(content(1, SIZE)))
        monkeypatch.setattr(named_peers, "PeerStore", lambda *given: PeerStore(*given[:4], 30.0))
        store = NamedPeers(NAME, rig.port, NAMESPACE, b"", addresses=named_peers._addresses, clock=lambda: 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", answers("::1", "127.0.0.1"))
            store._look_up()
        with contextlib.closing(store):
            assert store.find(keys(1, 2)) == 1
            memory, frames = blank(SIZE)
            assert store.load(key(1), frames) and memory == content(1, SIZE)
            assert [peer.failures for peer in store._peers] == [1, 0]


def test_an_engine_with_an_address_of_each_family_is_asked_once() -> None:
    with pods(1) as made:
        made.put(0, 1)
        made.slow = {"::1"}
        made.addresses = ["127.0.0.1", "::1"]
        assert made.store.find(keys(1, 2)) == 1 and not made.asked


@pytest.mark.parametrize(
    ("host", "kind"),
    [("127.0.0.1", PeerStore), ("[::1]", PeerStore), ("localhost", PeerStore), ("prod-kv.llm", NamedPeers)],
)
def test_a_name_is_of_several_engines_and_an_address_is_of_one(host: str, kind: type) -> None:
    store = make_store(KVTier(type="peer", url=f"tcp://{host}:7090"), "0f" * 16)
    assert type(store) is kind
    store.close()
