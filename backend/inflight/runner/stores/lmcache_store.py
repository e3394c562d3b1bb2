"""A KV store in LMCache's multiprocess server: any medium that it has, memory, disk, object stores.  No torch.

LMCache keeps KV tensors by their tokens.  Here an extent is a sequence of "tokens" that spell its key, and its bytes
are cut into objects of `CHUNK_BYTES`, the first of which begins with the extent's length:

    tokens   key 16, version 1, then zeros; `chunk_tokens` of them for each object
    objects  length 8 bytes, seal, blocks, zeros to the end of the last object

They are written and read in memory that the server shares, so it must run on the same machine; its own media may be
elsewhere.  Nothing in it can be removed by key: an extent that was damaged gets a new version in the place of it.
"""

from __future__ import annotations

import errno
import importlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from inflight.engine.tiers.base import Frames, TornError
from inflight.runner.stores.copy_frames import copy_frames
from inflight.runner.stores.lmcache_wire import CHUNK_BYTES, Connection, Operation, Request

__all__ = ["LMCacheStore"]

_SECONDS = 1.0  # for a call of the store
_LENGTH = struct.Struct("<Q")
_MOST_CHUNK_TOKENS = 4096  # each message has so many for each object
_BATCH = 32  # keys that are looked up together
_POLL_SECONDS = 2e-3
_REMEMBERED = 2**16  # extents that were dropped
_VERSIONS = 256


class LMCacheStore:
    """Implements `KVStore`.  Connects when it is first used, and again after any failure.

    Args:
        url: `tcp://host:port` of a server that was started with
            `--supported-transfer-mode engine_driven --shm-name NAME`.
        namespace: what the KV belongs to, as hexadecimal digits.
        seconds: for a call.

    Raises:
        ImportError: the package `pyzmq` is missing.
    """

    def __init__(self, url: str, namespace: str, seconds: float = _SECONDS) -> None:
        self._zmq: Any = importlib.import_module("zmq")
        self._url, self._seconds = url, seconds
        self._model_name = f"inflight-{namespace}"
        self._context: Any = None
        self._idle: list[Connection] = []
        self._dropped: OrderedDict[bytes, int] = OrderedDict()  # key -> version
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """0: the server knows."""
        return 0

    def find(self, keys: Sequence[bytes]) -> int:
        return next((start + has.index(False) for start, has in self._parts(keys) if not all(has)), len(keys))

    def first_of(self, keys: Sequence[bytes]) -> int:
        return next((start + has.index(True) for start, has in self._parts(keys) if any(has)), len(keys))

    def load(self, key: bytes, frames: Frames) -> bool:
        """See `KVStore`.  An extent of another size is dropped.

        Raises:
            TornError: it has another size.
            TimeoutError, OSError: of the server.
        """
        try:
            return self._load(key, frames, sum([frame.nbytes for frame in frames]))
        except TornError:
            self.drop(key)
            raise

    def store(self, key: bytes, frames: Frames) -> bool:
        size = sum([frame.nbytes for frame in frames])
        value, count = memoryview(b"".join([_LENGTH.pack(size), *frames])), _objects(size)
        with self._connection() as connection:
            session = connection.session()
            mine = connection.key(self._tokens(connection, key, count), 0, session)
            (answer,) = connection.ask([Request(Operation.PREPARE_STORE, [mine, connection.instance])])
            places, numbers = connection.slots(answer)
            if len(places) != len(numbers) or not all(0 <= number < count for number in numbers):
                raise OSError(errno.EIO, f"LMCache gives {len(places)} places for the objects {numbers} of {count}")
            for place, number in zip(places, numbers, strict=True):
                piece = value[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
                place[: piece.nbytes] = piece
            if places:
                connection.ask([Request(Operation.COMMIT_STORE, [mine, connection.instance, b""])])
            connection.ask([Request(Operation.END_SESSION, [session])])
            # An object without a place is there already, is being written by another engine, or did not fit.
            return self._have(connection, [key], count)[0]

    def drop(self, key: bytes) -> None:
        with self._lock:
            self._dropped[key] = (self._dropped.get(key, 0) + 1) % _VERSIONS
            self._dropped.move_to_end(key)
            if len(self._dropped) > _REMEMBERED:
                self._dropped.popitem(last=False)

    def close(self) -> None:
        with self._lock:
            self._close_idle()
            if self._context is not None:
                self._context.destroy(0)
                self._context = None

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """One that no other thread uses, registered.

        Raises:
            TimeoutError: the server does not answer.
            OSError: anything else.
        """
        with self._lock:
            if self._context is None:
                self._context = self._zmq.Context()
            connection = self._idle.pop() if self._idle else None
        is_kept = False
        try:
            if connection is None:
                connection = Connection(self._context, self._url, self._model_name)
            connection.begin(self._seconds)
            try:
                yield connection
            except TornError:
                is_kept = True
                raise
            is_kept = True
        except self._zmq.ZMQError as error:
            raise OSError(errno.EIO, f"LMCache: {error}") from None
        finally:
            if connection is not None:
                self._give_back(connection, is_kept)

    def _give_back(self, connection: Connection, is_kept: bool) -> None:
        with self._lock:
            self._idle.append(connection)
            if not is_kept:
                self._close_idle()  # all of them: the server may have started anew

    def _close_idle(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _parts(self, keys: Sequence[bytes]) -> Iterator[tuple[int, list[bool]]]:
        """Index of a part of the keys, and for each of them whether it seems to be there."""
        for start in range(0, len(keys), _BATCH):
            with self._connection() as connection:
                has = self._have(connection, keys[start : start + _BATCH])
            yield start, has

    def _load(self, key: bytes, frames: Frames, size: int) -> bool:
        with self._connection() as connection:
            tokens, session = self._tokens(connection, key, _objects(size)), connection.session()
            (found,) = self._looked_up(connection, [tokens], [session])
            if found != _objects(size):
                self._let_go(connection, [tokens], [session])
                return False
            arguments = [connection.key(tokens, 0, session), connection.instance]
            (answer,) = connection.ask([Request(Operation.PREPARE_RETRIEVE, arguments)])
            places, _ = connection.slots(answer)
            try:
                return len(places) == found and _read(places, frames, size)
            finally:
                connection.ask([Request(Operation.COMMIT_RETRIEVE, arguments)])
                connection.ask([Request(Operation.END_SESSION, [session])])

    def _have(self, connection: Connection, keys: Sequence[bytes], count: int = 1) -> list[bool]:
        """Whether it has the first `count` objects of each."""
        tokens = [self._tokens(connection, key, count) for key in keys]
        sessions = [connection.session() for _ in keys]
        found = self._looked_up(connection, tokens, sessions)
        self._let_go(connection, tokens, sessions)
        return [number == count for number in found]

    def _looked_up(self, connection: Connection, tokens: list[list[int]], sessions: list[str]) -> list[int]:
        """How many of the leading objects of each sequence it has, which it now holds in its memory for us."""
        names = zip(tokens, sessions, strict=True)
        connection.ask([Request(Operation.LOOKUP, [connection.key(one, None, name), 1]) for one, name in names])
        found: dict[str, int] = {}
        asked = False
        while waiting := [name for name in sessions if name not in found]:
            if asked:
                connection.pause(_POLL_SECONDS)
            asked = True
            answers = connection.ask([Request(Operation.QUERY_PREFETCH_STATUS, [name]) for name in waiting])
            found |= {name: one for name, one in zip(waiting, answers, strict=True) if one is not None}
        return [found[name] for name in sessions]

    def _let_go(self, connection: Connection, tokens: list[list[int]], sessions: list[str]) -> None:
        names = zip(tokens, sessions, strict=True)
        connection.ask(
            [Request(Operation.FREE_LOOKUP_LOCKS, [connection.key(one, None, name), 1]) for one, name in names]
        )
        connection.ask([Request(Operation.END_SESSION, [name]) for name in sessions])

    def _tokens(self, connection: Connection, key: bytes, count: int) -> list[int]:
        spelled = [*key, self._dropped.get(key, 0)]
        if not len(spelled) <= connection.chunk_tokens <= _MOST_CHUNK_TOKENS:
            sizes = f"from {len(spelled)} to {_MOST_CHUNK_TOKENS}, and is {connection.chunk_tokens}"
            raise OSError(errno.EIO, f"LMCache: --chunk-size must be {sizes}; 256 is its default")
        return spelled + [0] * (connection.chunk_tokens * count - len(spelled))


def _objects(size: int) -> int:
    return -(-(size + _LENGTH.size) // CHUNK_BYTES)


def _read(places: Sequence[memoryview], frames: Frames, size: int) -> bool:
    """Copy the value into the frames.  Raises TornError if it has another size."""
    (length,) = _LENGTH.unpack_from(places[0])
    if length != size:
        raise TornError(f"a value has {length} bytes, and {size} were expected")
    copy_frames([places[0][_LENGTH.size :], *places[1:]], frames)
    return True
