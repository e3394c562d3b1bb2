"""The engines behind a host name as one KV store: a headless Service of Kubernetes has each pod's address.  No torch.

Each engine is a `PeerStore`.  One that fails is left alone for a while, and then asked after the others, so that a
question seldom waits for more than one of them.  Only if none answers does the store fail.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from inflight.engine.tiers.base import Frames, TornError
from inflight.runner.stores.peer_store import PeerStore

__all__ = ["NamedPeers"]

_log = logging.getLogger(__name__)

_LOOK_UP_SECONDS = 5.0  # for which addresses are known
_FIRST_REST, _LONGEST_REST = 1.0, 30.0  # seconds
_MOST_PEERS = 16  # of a name, in each family; each of them has a place for 21 readers
_REMEMBERED = 2**14  # extents whose engine is known
_T = TypeVar("_T")


def _addresses(host: str) -> list[str]:
    """Those of the family that is preferred, sorted, and then those of the other one.

    Raises:
        OSError: the name is not known.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise OSError(errno.EHOSTUNREACH, f"the name {host} cannot be resolved: {error}") from None
    return [name for _, name in sorted({(family != found[0][0], str(address[0])) for family, *_, address in found})]


@dataclass(eq=False)
class _Peer:
    """
    Attributes:
        is_second: an address of the family that is not preferred, perhaps of an engine that has another address, too:
            it is asked only if none of the first family has answered.
        failures: in a row.
    """

    address: str
    store: PeerStore
    is_second: bool = False
    failures: int = 0
    rests_until: float = float("-inf")


class NamedPeers:
    """Implements `KVStore`.  Touches no network before it is first used.

    Args:
        host, port: where the engines listen; the name's addresses are looked up again every few seconds, in a thread of
            their own.
        namespace, secret: as of `PeerStore`.
        seconds: for an answer of one engine; a question that has taken so long asks no other one.
        addresses: of a host name, the first family first.
        clock: seconds.
    """

    num_bytes = 0  # the other engines count them

    def __init__(
        self,
        host: str,
        port: int,
        namespace: bytes,
        secret: bytes,
        seconds: float = 1.0,
        addresses: Callable[[str], Sequence[str]] = _addresses,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._addresses, self._clock, self._seconds = host, addresses, clock, seconds
        self._make = lambda address: PeerStore(address, port, namespace, secret, seconds)
        self._lock = threading.Lock()
        self._peers: list[_Peer] = []
        self._looking = threading.Lock()  # held while the name is looked up
        self._looked_up = float("-inf")  # when the last look-up ended
        self._is_lost = self._is_closed = False
        self._holders: OrderedDict[bytes, str] = OrderedDict()  # extent -> address of an engine that has it

    def find(self, keys: Sequence[bytes]) -> int:
        most = 0
        for peer, found in self._answers(keys[:1], lambda store: store.find(keys), lambda found: found == len(keys)):
            if found > most:
                most = found
                self._remember(keys[:found], peer)
        return most

    def first_of(self, keys: Sequence[bytes]) -> int:
        first = len(keys)
        for peer, found in self._answers(keys[:1], lambda store: store.first_of(keys), lambda found: not found):
            if found < first:
                first = found
                self._remember(keys[found : found + 1], peer)
        return first

    def load(self, key: bytes, frames: Frames) -> bool:
        for peer, loaded in self._answers([key], lambda store: store.load(key, frames), bool)[-1:]:
            if loaded:
                self._remember([key], peer)
                return True
        return False

    def store(self, key: bytes, frames: Frames) -> bool:
        return False

    def drop(self, key: bytes) -> None:
        """Ask another engine first the next time: it is the other engines', and damaged at one of them."""
        with self._lock:
            damaged = next((peer for peer in self._peers if peer.address == self._holders.get(key)), None)
            if damaged is not None:
                family = [peer for peer in self._peers if peer.is_second is damaged.is_second]
                self._holders[key] = family[(family.index(damaged) + 1) % len(family)].address

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            peers, self._peers = self._peers, []
        for peer in peers:
            peer.store.close()

    def _answers(
        self, keys: Sequence[bytes], ask: Callable[[PeerStore], _T], is_enough: Callable[[_T], bool]
    ) -> list[tuple[_Peer, _T]]:
        """The engines' answers, first that of the engine which is known to have the first key, until one is enough.

        There may be none if the time was over before all were asked.

        Raises:
            TimeoutError, OSError, TornError: all were asked, and none has answered.
        """
        answers: list[tuple[_Peer, _T]] = []
        failure: Exception = OSError(errno.EHOSTUNREACH, f"no engine at {self._host} has answered lately")
        peers = self._asked(keys)
        until = self._clock() + self._seconds
        for peer in peers:
            if answers and peer.is_second:
                continue
            if peer is not peers[0] and self._clock() >= until:
                return answers
            failures = peer.failures
            try:
                answer = ask(peer.store)
            except TornError as error:  # it is well
                failure = error
                continue
            except OSError as error:  # TimeoutError, too
                failure = error
                self._failed(peer, failures, error)
                continue
            with self._lock:
                peer.failures, peer.rests_until = 0, float("-inf")
            answers.append((peer, answer))
            if is_enough(answer):
                break
        if not answers:
            raise failure
        return answers

    def _asked(self, keys: Sequence[bytes]) -> list[_Peer]:
        """The engines that are well, the first family first, and one that has failed and rested; at least one."""
        self._look_up()
        with self._lock:
            peers, known = list(self._peers), self._holders.get(keys[0]) if keys else None
            now = self._clock()
            well = [peer for peer in peers if not peer.failures]
            rested = [peer for peer in peers if peer.failures and now >= peer.rests_until]
            one = min(rested, key=lambda peer: (peer.is_second, peer.rests_until), default=None)
            if not well and one is None:
                one = min(peers, key=lambda peer: peer.rests_until, default=None)
        well.sort(key=lambda peer: (peer.is_second, peer.address != known))
        return well if one is None else [*well, one]

    def _look_up(self) -> None:
        """If it is time, and beside the question, which waits only while no address is known.

        Raises:
            OSError: none is known.
        """
        if self._is_closed:
            return
        if not self._peers:
            with self._looking:
                if not self._peers:
                    self._learn()
        elif self._clock() - self._looked_up >= _LOOK_UP_SECONDS and self._looking.acquire(blocking=False):
            try:
                threading.Thread(target=self._learn_again, name="kv-peer-names", daemon=True).start()
            except RuntimeError:  # no thread can be had at the moment
                self._looking.release()

    def _learn_again(self) -> None:
        try:
            self._learn()
            self._is_lost = False
        except OSError as error:
            if not self._is_lost:
                _log.warning("KV tier peer: %s; the engines that it named are read further", error.strerror or error)
            self._is_lost = True
        finally:
            self._looking.release()

    def _learn(self) -> None:
        """Look the name up, in one thread at a time."""
        try:
            found = list(self._addresses(self._host))
        finally:
            self._looked_up = self._clock()
        second = {address: (":" in address) != (":" in found[0]) for address in found}
        families = [[one for one in found if second[one] is is_second] for is_second in (False, True)]
        kept = [one for family in families for one in family[:_MOST_PEERS]]
        with self._lock:
            if self._is_closed:
                return
            known = {peer.address: peer for peer in self._peers}
            self._peers = [known.get(address) or _Peer(address, self._make(address)) for address in kept]
            for peer in self._peers:
                peer.is_second = second[peer.address]
        if len(families[0]) > _MOST_PEERS and set(kept) != set(known):
            _log.warning("KV tier peer: %s has %d addresses; %d are read", self._host, len(families[0]), _MOST_PEERS)
        for address in known.keys() - set(kept):
            known[address].store.close()

    def _failed(self, peer: _Peer, failures: int, error: OSError) -> None:
        """
        Args:
            failures: that it had when it was asked; if others have been counted since, this one is the same.
        """
        with self._lock:
            if peer.failures != failures:
                return
            rest = min(_LONGEST_REST, _FIRST_REST * 2 ** min(failures, 16))
            peer.failures += 1
            peer.rests_until = self._clock() + rest
        if peer.failures & (peer.failures - 1) == 0:  # the first, the second, the fourth
            _log.warning("KV tier peer: an engine of %s is left alone for %g s: %s", self._host, rest, error)

    def _remember(self, keys: Sequence[bytes], peer: _Peer) -> None:
        with self._lock:
            for key in keys:
                self._holders[key] = peer.address
                self._holders.move_to_end(key)
            while len(self._holders) > _REMEMBERED:
                self._holders.popitem(last=False)
