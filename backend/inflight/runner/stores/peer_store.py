"""Another engine's host memory as a KV store: it is read, and never written.  No torch.

The engine there has `kv_listen`.  It is asked by content, and promises nothing: it may
have evicted what it has just found, be dead, or run other weights.  All of these are a miss.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from inflight.engine.tiers.base import Frames, TornError
from inflight.runner.stores.peer_wire import (
    LENGTH_BYTES,
    MOST_ANSWER_BYTES,
    MOST_GREETING_BYTES,
    MOST_KEYS,
    NONCE_BYTES,
    VERSION,
    Challenge,
    Extent,
    Find,
    FirstOf,
    Hello,
    Load,
    Position,
    Welcome,
    decoded,
    encoded,
    proof,
    seconds_for,
)

__all__ = ["PeerStore"]

_log = logging.getLogger(__name__)

_SECONDS = 1.0  # for an answer
_CONNECT_SECONDS = 0.5
_OTHER_SECONDS = 5.0  # in which an engine that has other KV is not asked again
_MOST_BUFFERS = 512  # of a system call, which takes 1,024
_T = TypeVar("_T")


class PeerStore:
    """Implements `KVStore`.  Connects when it is first used, and again after any failure.

    Args:
        host, port: where the other engine listens.
        namespace: of the KV: 16 bytes.
        secret: of all engines that read each other; b"": none.
        seconds: for an answer; the bytes of an extent may take longer, at 8 MiB a second.
    """

    num_bytes = 0  # the other engine counts them

    def __init__(self, host: str, port: int, namespace: bytes, secret: bytes, seconds: float = _SECONDS) -> None:
        self._address = host, port
        self._namespace, self._secret, self._seconds = namespace, secret, seconds
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._other_until = float("-inf")
        self._is_other = self._is_closed = False

    def find(self, keys: Sequence[bytes]) -> int:
        return self._asked(lambda connection: connection.position(Find(list(keys[:MOST_KEYS]))), 0)

    def first_of(self, keys: Sequence[bytes]) -> int:
        asked = list(keys[:MOST_KEYS])
        found = self._asked(lambda connection: connection.position(FirstOf(asked)), len(asked))
        return found if found < len(asked) else len(keys)

    def load(self, key: bytes, frames: Frames) -> bool:
        return self._asked(lambda connection: connection.load(key, frames), False)

    def store(self, key: bytes, frames: Frames) -> bool:
        return False

    def drop(self, key: bytes) -> None:
        """Nothing: it is the other engine's."""

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _asked(self, ask: Callable[[_Connection], _T], otherwise: _T) -> _T:
        """The answer; `otherwise` if the engine there has other KV.

        Raises:
            TimeoutError, OSError, TornError: there is none.
        """
        if time.monotonic() < self._other_until:
            return otherwise
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                return self._asked_on(kept, ask)
            except ConnectionError:
                if kept.has_answered:
                    raise
        # The engine there was started anew, or has closed a connection that was idle for long.
        connection = _Connection(self._address, self._seconds, self._secret, self._namespace)
        if not connection.is_same:
            connection.close()
            self._other_until = time.monotonic() + _OTHER_SECONDS
            if not self._is_other:
                _log.warning(
                    "KV tier peer: the engine at %s, port %d, has other KV, and is not read: its checkpoint, dtype, "
                    "quantization, block size, version or kind of processor differs",
                    *self._address,
                )
            self._is_other = True
            return otherwise
        self._is_other = False
        return self._asked_on(connection, ask)

    def _asked_on(self, connection: _Connection, ask: Callable[[_Connection], _T]) -> _T:
        try:
            connection.begin(self._seconds)
            answer = ask(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return answer
        connection.close()
        return answer


class _Connection:
    """Of one thread at a time.  After any exception it must be closed.

    Attributes:
        is_same: whether both engines have KV of the same namespace.
        has_answered: since `begin`.

    Raises:
        TimeoutError, OSError: see `PeerStore`.
    """

    def __init__(self, address: tuple[str, int], seconds: float, secret: bytes, namespace: bytes) -> None:
        self.has_answered = False
        self._deadline = time.monotonic() + seconds
        self._name = f"the engine at {address[0]}, port {address[1]},"
        with self._said():
            self._socket = socket.create_connection(address, min(seconds, _CONNECT_SECONDS))
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.is_same = self._greet(secret, namespace)
        except BaseException:
            self.close()
            raise

    def _greet(self, secret: bytes, namespace: bytes) -> bool:
        challenge = self._message(Challenge, MOST_GREETING_BYTES)
        if challenge.version != VERSION:
            return False
        if challenge.is_full:
            raise OSError(errno.EBUSY, f"{self._name} has too many connections that have not greeted yet")
        nonce = secrets.token_bytes(NONCE_BYTES)
        nonces = challenge.nonce + nonce
        self._send(Hello(namespace, nonce, proof(secret, b"reader", nonces, namespace)))
        try:
            welcome = self._message(Welcome, MOST_GREETING_BYTES)
        except ConnectionError as error:
            raise OSError(errno.ECONNREFUSED, f"{error}; its kv_store_secret_file is another one") from None
        expected = proof(secret, b"server", nonces, namespace, welcome.is_same, welcome.is_full)
        if not hmac.compare_digest(welcome.proof, expected):
            raise OSError(errno.EACCES, f"{self._name} does not have the secret of kv_store_secret_file")
        if welcome.is_full:
            raise OSError(errno.EBUSY, f"{self._name} has too many readers")
        return welcome.is_same

    def begin(self, seconds: float) -> None:
        """The next question must be answered within so many seconds."""
        self._deadline = time.monotonic() + seconds
        self.has_answered = False

    def position(self, question: Find | FirstOf) -> int:
        self._send(question)
        return self._message(Position, MOST_ANSWER_BYTES).index

    def load(self, key: bytes, frames: Frames) -> bool:
        self._send(Load(key))
        size = self._message(Extent, MOST_ANSWER_BYTES).size
        if not size:
            return False
        if size != (expected := sum([frame.nbytes for frame in frames])):
            raise TornError(f"{self._name} has {size} bytes, and {expected} were expected")
        self._deadline += seconds_for(size)
        self._receive(frames)
        return True

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: msgspec.Struct) -> None:
        with self._said():
            self._socket.settimeout(self._left())
            self._socket.sendall(encoded(message))

    def _message(self, kind: Any, most_bytes: int) -> Any:
        head = bytearray(LENGTH_BYTES)
        self._receive([memoryview(head)])
        size = int.from_bytes(head, "big")
        if size > most_bytes:
            raise OSError(errno.EPROTO, f"{self._name} sends a message of {size} bytes; is it the port of kv_listen?")
        body = bytearray(size)
        self._receive([memoryview(body)])
        try:
            return decoded(body, kind)
        except msgspec.DecodeError as error:
            raise OSError(errno.EPROTO, f"{self._name} sends no answer: {error}") from None

    def _receive(self, frames: Frames) -> None:
        """Fill all of them."""
        rest = [frame for frame in frames if frame.nbytes]
        at = 0
        with self._said():
            while at < len(rest):
                self._socket.settimeout(self._left())
                count, *_ = self._socket.recvmsg_into(rest[at : at + _MOST_BUFFERS])
                if not count:
                    raise ConnectionResetError(errno.ECONNRESET, "it has closed the connection")
                self.has_answered = True
                while count and count >= rest[at].nbytes:
                    count -= rest[at].nbytes
                    at += 1
                if count:
                    rest[at] = rest[at][count:]

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        """Errors name the engine."""
        try:
            yield
        except TimeoutError:
            raise TimeoutError(errno.ETIMEDOUT, f"{self._name} did not answer in time") from None
        except OSError as error:
            raise OSError(error.errno or errno.EIO, f"{self._name} cannot be read: {error.strerror or error}") from None
