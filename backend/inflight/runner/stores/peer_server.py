"""Lets other engines read the host memory of this one (`kv_listen`).  No torch.

One thread serves all of them.  It sends the buffers that the tier of type "host" keeps: they do not change, and stay as
long as they are sent, even if their extent is evicted meanwhile.  The engine never waits for a reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from inflight.config import ConfigError
from inflight.engine.tiers.base import Frames
from inflight.runner.stores.host import HostStore
from inflight.runner.stores.peer_wire import (
    LENGTH_BYTES,
    MOST_GREETING_BYTES,
    MOST_QUESTION_BYTES,
    NONCE_BYTES,
    VERSION,
    Challenge,
    Extent,
    Find,
    FirstOf,
    Hello,
    Load,
    Position,
    Question,
    Welcome,
    decoded,
    encoded,
    proof,
    seconds_for,
)

__all__ = ["PeerServer"]

_log = logging.getLogger(__name__)

_MOST_READERS = 64  # connections; a reading engine has up to three
_MOST_STRANGERS = 64  # connections that have not proved the secret yet
_MOST_SENDS = 16  # extents that are sent at the same time
_MOST_BUFFERS = 512  # of a system call, which takes 1,024
_GREETING_SECONDS = 1.0
_IDLE_SECONDS = 600.0
_SEND_SECONDS = 1.0
_COMING_SECONDS = 0.5  # for which a reader waits for an extent that is about to be stored
_POLL_SECONDS = 0.0005
_AGAIN_SECONDS = 1.0  # until a port is tried again that another process has
_CLOSE_SECONDS = 2.0


class PeerServer:
    """Listens in a thread of its own, from now until `close`.

    If another process has the port, perhaps the version of this model that is about to be unloaded, it is tried again
    until it is free.

    Args:
        host, port: to listen on.
        store: what is served.
        is_coming: whether the extent of this key is about to be stored there; called in the server's thread.
        namespace: of the KV: 16 bytes.
        secret: that readers must have; b"": none.

    Raises:
        ConfigError: it can never listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        store: HostStore,
        is_coming: Callable[[bytes], bool],
        namespace: bytes,
        secret: bytes,
    ) -> None:
        self._host, self._port = host, port
        self._store, self._is_coming = store, is_coming
        self._namespace, self._secret = namespace, secret
        self._strangers: set[socket.socket] = set()
        self._readers: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused = Counter[str]()
        listener = self._bound()
        if listener is None:
            _log.warning("kv_listen: another process has %s, port %d; it is tried again every second", host, port)
        self._loop = asyncio.new_event_loop()
        self._sends = asyncio.Semaphore(_MOST_SENDS)
        self._main = self._loop.create_task(self._listen(listener))
        self._thread = threading.Thread(target=self._run, name="kv-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and all connections."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._main.cancel)
        if threading.current_thread() is not self._thread:  # as a finalizer, it can run in any thread
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main)
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                self._loop.run_until_complete(asyncio.wait({*self._tasks}))  # some may just be done
        finally:
            self._loop.close()

    def _bound(self) -> socket.socket | None:
        """None: another process has the port."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            return socket.create_server((self._host, self._port), family=family, backlog=_MOST_STRANGERS)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise ConfigError(
                f"kv_listen: cannot listen on {self._host}, port {self._port}: {error.strerror or error}; give an "
                'address of this machine, or "0.0.0.0" for all of them, and a port from 1024 on'
            ) from None

    async def _listen(self, listener: socket.socket | None) -> None:
        while listener is None:
            await asyncio.sleep(_AGAIN_SECONDS)
            with contextlib.suppress(ConfigError):  # the address is away for the moment: it was there
                listener = self._bound()
        with listener:
            listener.setblocking(False)
            _log.info("kv_listen: others can read host memory at %s, port %d", self._host, self._port)
            while True:
                try:
                    client, _ = await self._loop.sock_accept(listener)
                except OSError as error:  # no descriptors are left
                    _log.warning("kv_listen: %s", error)
                    await asyncio.sleep(_AGAIN_SECONDS)
                    continue
                if len(self._strangers) >= _MOST_STRANGERS:
                    self._refuse(f"more than {_MOST_STRANGERS} connections have not greeted yet")
                    _send_at_once(client, Challenge(VERSION, bytes(NONCE_BYTES), is_full=True))
                    continue
                self._strangers.add(client)
                task = self._loop.create_task(self._serve(client))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, EOFError, msgspec.DecodeError):
            try:
                client.setblocking(False)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._ended_after(client, _GREETING_SECONDS):
                    may_read = await self._greeted(client)
                self._strangers.discard(client)
                while may_read:
                    await self._answer(client)
            finally:
                self._strangers.discard(client)
                self._readers.discard(client)

    async def _greeted(self, client: socket.socket) -> bool:
        """Whether it may read: it has the secret, and KV of the same namespace, and there is room for it."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        await self._loop.sock_sendall(client, encoded(Challenge(VERSION, nonce)))
        hello = await self._message(client, Hello, MOST_GREETING_BYTES)
        nonces = nonce + hello.nonce
        if not hmac.compare_digest(hello.proof, proof(self._secret, b"reader", nonces, hello.namespace)):
            self._refuse("a reader has another kv_store_secret_file")
            return False
        is_same = hello.namespace == self._namespace
        is_full = is_same and len(self._readers) >= _MOST_READERS
        if is_full:
            self._refuse(f"{_MOST_READERS} connections of readers are open, and one more was refused")
        elif is_same:
            self._readers.add(client)
        mine = proof(self._secret, b"server", nonces, hello.namespace, is_same, is_full)
        await self._loop.sock_sendall(client, encoded(Welcome(is_same, is_full, mine)))
        return is_same and not is_full

    def _refuse(self, why: str) -> None:
        self._refused[why] += 1
        if self._refused[why] & (self._refused[why] - 1) == 0:  # the first, the second, the fourth
            _log.warning("kv_listen: %s (%d so far)", why, self._refused[why])

    async def _answer(self, client: socket.socket) -> None:
        with self._ended_after(client, _IDLE_SECONDS):
            question = await self._message(client, Question, MOST_QUESTION_BYTES)
        match question:
            case Load(key):
                await self._send_extent(client, key)
            case Find(keys):
                await self._send_position(client, keys, False)
            case FirstOf(keys):
                await self._send_position(client, keys, True)

    async def _send_position(self, client: socket.socket, keys: Sequence[bytes], is_there: bool) -> None:
        """Of the first key that is there or not."""
        found = next((n for n, key in enumerate(keys) if self._has(key) is is_there), len(keys))
        with self._ended_after(client, _SEND_SECONDS):
            await self._loop.sock_sendall(client, encoded(Position(found)))

    async def _send_extent(self, client: socket.socket, key: bytes) -> None:
        until = self._loop.time() + _COMING_SECONDS
        while self._is_coming(key) and not self._store.find([key]) and self._loop.time() < until:
            await asyncio.sleep(_POLL_SECONDS)
        async with self._sends:
            frames = self._store.kept(key) or ()
            size = sum([frame.nbytes for frame in frames])
            with self._ended_after(client, _SEND_SECONDS + seconds_for(size)):
                await self._send_all(client, [memoryview(encoded(Extent(size))), *frames])

    async def _send_all(self, client: socket.socket, frames: Frames) -> None:
        """In one call, as far as there is room: if the first bytes came alone, the reader would wake up for them."""
        try:
            sent = client.sendmsg(frames[:_MOST_BUFFERS])
        except BlockingIOError:
            sent = 0
        for frame in frames:
            if sent < frame.nbytes:
                await self._loop.sock_sendall(client, frame[sent:])
            sent = max(0, sent - frame.nbytes)

    def _has(self, key: bytes) -> bool:
        return self._is_coming(key) or bool(self._store.find([key]))  # in this order: it can be stored in between

    async def _message(self, client: socket.socket, kind: Any, most_bytes: int) -> Any:
        """
        Raises:
            EOFError: the client is gone, or sends something else.
            msgspec.DecodeError: the same.
        """
        size = int.from_bytes(await self._received(client, LENGTH_BYTES), "big")
        if size > most_bytes:
            raise EOFError
        return decoded(await self._received(client, size), kind)

    async def _received(self, client: socket.socket, size: int) -> bytearray:
        received = bytearray(size)
        rest = memoryview(received)
        while rest:
            count = await self._loop.sock_recv_into(client, rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return received

    @contextlib.contextmanager
    def _ended_after(self, client: socket.socket, seconds: float) -> Iterator[None]:
        """Sends and reads of this client fail then."""
        timer = self._loop.call_later(seconds, _end, client)
        try:
            yield
        finally:
            timer.cancel()


def _end(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def _send_at_once(client: socket.socket, message: msgspec.Struct) -> None:
    """And hang up: a new connection has room for it."""
    with client, contextlib.suppress(OSError):
        client.setblocking(False)
        client.send(encoded(message))
