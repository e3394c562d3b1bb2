"""The engines behind a host name as one KV store: a headless Service of Kubernetes has each pod's address.  No torch.

Each engine is a `PeerStore`.  One that fails is left alone for a while, and only if none answers does the store fail.
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
_MOST_PEERS = 16  # of a name; each of them has a place for 21 readers
_REMEMBERED = 2**14  # extents whose engine is known
_T = TypeVar("_T")


def _addresses(host: str) -> list[str]:
    """Those of the family that is preferred, sorted: an engine with an address of each is asked once.

    Raises:
        OSError: the name is not known.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise OSError(errno.EHOSTUNREACH, f"the name {host} cannot be resolved: {error}") from None
    return sorted({str(address[0]) for family, *_, address in found if family == found[0][0]})


@dataclass
class _Peer:
    address: str
    store: PeerStore
    failures: int = 0
    rests_until: float = float("-inf")


class NamedPeers:
    """Implements `KVStore`.  Touches no network before it is first used.

    Args:
        host, port: where the engines listen; the name's addresses are looked up again every few seconds.
        namespace, secret: as of `PeerStore`.
        seconds: for an answer of one engine.
        addresses: of a host name.
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
        self._host, self._addresses, self._clock = host, addresses, clock
        self._make = lambda address: PeerStore(address, port, namespace, secret, seconds)
        self._lock = threading.Lock()
        self._peers: list[_Peer] = []
        self._looked_up = float("-inf")
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
        peer, loaded = self._answers([key], lambda store: store.load(key, frames), bool)[-1]
        if loaded:
            self._remember([key], peer)
        return loaded

    def store(self, key: bytes, frames: Frames) -> bool:
        return False

    def drop(self, key: bytes) -> None:
        """Ask another engine first the next time: it is the other engines', and damaged at one of them."""
        with self._lock:
            addresses, damaged = [peer.address for peer in self._peers], self._holders.get(key)
            if damaged in addresses:
                self._holders[key] = addresses[(addresses.index(damaged) + 1) % len(addresses)]

    def close(self) -> None:
        with self._lock:
            peers, self._peers = self._peers, []
        for peer in peers:
            peer.store.close()

    def _answers(
        self, keys: Sequence[bytes], ask: Callable[[PeerStore], _T], is_enough: Callable[[_T], bool]
    ) -> list[tuple[_Peer, _T]]:
        """The engines' answers, first that of the engine which is known to have the first key, until one is enough.

        Raises:
            TimeoutError, OSError, TornError: none has answered.
        """
        answers: list[tuple[_Peer, _T]] = []
        failure: Exception = OSError(errno.EHOSTUNREACH, f"no engine at {self._host} has answered lately")
        for peer in self._asked(keys):
            try:
                answer = ask(peer.store)
            except TornError as error:  # it is well
                failure = error
                continue
            except OSError as error:  # TimeoutError, too
                failure = error
                self._failed(peer, error)
                continue
            peer.failures = 0
            answers.append((peer, answer))
            if is_enough(answer):
                break
        if not answers:
            raise failure
        return answers

    def _asked(self, keys: Sequence[bytes]) -> list[_Peer]:
        """The engines that do not rest; if all do, the one that has rested longest."""
        self._look_up()
        with self._lock:
            peers, known = list(self._peers), self._holders.get(keys[0]) if keys else None
        now = self._clock()
        awake = [peer for peer in peers if now >= peer.rests_until]
        awake = awake or sorted(peers, key=lambda peer: peer.rests_until)[:1]
        return sorted(awake, key=lambda peer: peer.address != known)

    def _look_up(self) -> None:
        with self._lock:
            if self._clock() - self._looked_up < _LOOK_UP_SECONDS:
                return
            self._looked_up = self._clock()
            known = {peer.address: peer for peer in self._peers}
        try:
            found = list(self._addresses(self._host))
        except OSError as error:
            if not known:
                with self._lock:
                    self._looked_up = float("-inf")
                raise
            _log.warning("KV tier peer: %s; the engines that it named are read further", error.strerror)
            return
        kept = found[:_MOST_PEERS]
        if len(found) > len(kept) and set(kept) != set(known):
            _log.warning("KV tier peer: %s has %d addresses; %d are read", self._host, len(found), _MOST_PEERS)
        with self._lock:
            self._peers = [known.get(address) or _Peer(address, self._make(address)) for address in kept]
        for address in known.keys() - set(kept):
            known[address].store.close()

    def _failed(self, peer: _Peer, error: OSError) -> None:
        rest = min(_LONGEST_REST, _FIRST_REST * 2 ** min(peer.failures, 16))
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
