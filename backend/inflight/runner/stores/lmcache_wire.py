"""A connection to LMCache's multiprocess server: its messages over ZeroMQ, and the memory that it shares.  No torch.

A request is [number, operation, *arguments], an answer [number, operation, result if there is one], each part in
MessagePack.  The numbers of the operations are frozen (`lmcache/v1/multiprocess/transport/zmq_impl/wire.py`).  If
something fails in the server, no answer comes.  LMCache's own client needs torch, CUDA and some forty packages of
fixed versions, and unpickles what the server sends if there is no shared memory; neither is wanted here.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

__all__ = ["CHUNK_BYTES", "Connection", "Operation", "Slot"]

CHUNK_BYTES = 128 * 1024  # of one object in the server: its last one is padded
_REFRESHED_SECONDS = 5.0  # a server that has started anew does not know this connection
_LINGER_MILLISECONDS = 100  # to say goodbye
_SEND_MILLISECONDS = 200  # only if a thousand messages wait to be sent
_MOST_ANSWER_BYTES = 2**20


class Operation(IntEnum):
    """Of the server."""

    LOOKUP = 8
    QUERY_PREFETCH_STATUS = 9
    FREE_LOOKUP_LOCKS = 12
    END_SESSION = 13
    REGISTER = 14
    UNREGISTER = 15
    PREPARE_STORE = 16
    COMMIT_STORE = 17
    PREPARE_RETRIEVE = 18
    COMMIT_RETRIEVE = 19
    GET_CHUNK_SIZE = 21


class Slot(msgspec.Struct):
    """A place in the shared memory, in bytes."""

    offset: int
    length: int


class _Registered(msgspec.Struct):
    shm_name: str
    pool_size: int


class _Places(msgspec.Struct):
    slots: list[Slot] = []
    chunk_indices: list[int] = []


class _Prepared(msgspec.Struct):
    context: _Places


class Request(NamedTuple):
    """One question."""

    operation: Operation
    arguments: Sequence[Any]


class Connection:
    """Of one thread at a time.  After any exception it must be closed.

    Args:
        context: `zmq.Context`.
        url: `tcp://host:port`.
        model_name: under which the server keeps the objects.

    Attributes:
        instance: the server's name for this connection.
        chunk_tokens: tokens of an object; known after `begin`.
    """

    def __init__(self, context: Any, url: str, model_name: str) -> None:
        self.instance = secrets.randbits(62)
        self.chunk_tokens = 0
        self._zmq = importlib.import_module("zmq")
        self._model_name = model_name
        self._numbers = itertools.count()
        self._sessions = itertools.count()
        self._seconds = self._deadline = self._refreshed = 0.0
        self._memory: mmap.mmap | None = None
        self._memory_id: tuple[int, int] | None = None
        self._socket = context.socket(self._zmq.DEALER)
        self._socket.setsockopt(self._zmq.LINGER, _LINGER_MILLISECONDS)
        self._socket.setsockopt(self._zmq.SNDTIMEO, _SEND_MILLISECONDS)
        self._socket.setsockopt(self._zmq.MAXMSGSIZE, _MOST_ANSWER_BYTES)
        self._socket.connect(url)

    def begin(self, seconds: float) -> None:
        """Each question from now on must be answered within so many seconds; register, if it was not done lately.

        Raises:
            OSError: the server shares no memory with this process.
            TimeoutError: it did not answer.
        """
        now = time.monotonic()
        self._seconds, self._deadline = seconds, now + seconds
        if self._memory is not None and now - self._refreshed < _REFRESHED_SECONDS:
            return
        payload = {
            "instance_id": self.instance,
            "model_name": self._model_name,
            "world_size": 1,
            "block_size": 1,
            "num_layers": 1,
            "hidden_dim_size": CHUNK_BYTES,
            "dtype_str": "uint8",
            "use_mla": True,
            "num_physical_slots": 1,
        }
        answers = self.ask([Request(Operation.REGISTER, [payload]), Request(Operation.GET_CHUNK_SIZE, [])])
        registered, self.chunk_tokens = _converted(answers[0], _Registered), _converted(answers[1], int)
        self._map(registered)
        self._refreshed = now

    def ask(self, requests: Sequence[Request]) -> list[Any]:
        """The answers, in the order of the requests, which the server may work on side by side.

        Raises:
            TimeoutError: not all have come in time.
            OSError: what came is no answer.
        """
        waits: dict[int, int] = {}
        for index, request in enumerate(requests):
            waits[number := next(self._numbers)] = index
            self._send(number, request)
        answers: list[Any] = [None] * len(requests)
        deadline = time.monotonic() + self._seconds
        while waits:
            left = max(0.0, deadline - time.monotonic())  # a thread that did not run meanwhile takes what has come
            if not self._socket.poll(int(left * 1000) + 1):
                operation = requests[next(iter(waits.values()))].operation.name.lower()
                raise TimeoutError(errno.ETIMEDOUT, f"LMCache did not answer {operation} in time")
            parts = self._socket.recv_multipart()
            try:
                number, _, *result = map(msgspec.msgpack.decode, parts)
                index = waits.pop(number, -1)  # -1: of an earlier question
            except (msgspec.DecodeError, TypeError, ValueError):
                raise OSError(errno.EIO, f"LMCache: no answer: {parts[:3]!r:.80}") from None
            if index >= 0:
                answers[index] = result[0] if result else None
        return answers

    def pause(self, seconds: float) -> None:
        """Wait before asking again.  Raises TimeoutError if that has been done for as long as `begin` was told."""
        if time.monotonic() + seconds >= self._deadline:
            raise TimeoutError(errno.ETIMEDOUT, "LMCache has not read in time what it has on slower media")
        time.sleep(seconds)

    def key(self, tokens: Sequence[int], worker: int | None, session: str) -> dict[str, Any]:
        """The server's key of the objects of these tokens."""
        return {
            "model_name": self._model_name,
            "world_size": 1,
            "worker_id": worker,
            "token_ids": tokens,
            "start": 0,
            "end": len(tokens),
            "request_id": session,
            "cache_salt": "",
            "num_kv_readers": 1,
        }

    def session(self) -> str:
        """A name that was not used before."""
        return f"inflight-{self.instance:x}-{next(self._sessions)}"

    def slots(self, answer: object) -> tuple[list[memoryview], list[int]]:
        """The places that the server has named, writable, and the numbers of their objects if it has said them.

        Raises:
            OSError: they are not within the shared memory.
        """
        assert self._memory is not None
        found = _converted(answer, _Prepared).context
        size, memory = len(self._memory), memoryview(self._memory)
        if any(one.offset < 0 or one.length < CHUNK_BYTES or one.offset + CHUNK_BYTES > size for one in found.slots):
            raise OSError(errno.EIO, f"LMCache names places that are not in its {size} bytes of shared memory")
        places = [memory[one.offset : one.offset + CHUNK_BYTES] for one in found.slots]
        return places, found.chunk_indices

    def close(self) -> None:
        """Let the server free what it holds for this connection; does not wait."""
        with contextlib.suppress(self._zmq.ZMQError):
            self._send(next(self._numbers), Request(Operation.UNREGISTER, [self.instance]))
        self._socket.close()
        self._memory = None  # unmapped with its last view

    def _send(self, number: int, request: Request) -> None:
        parts = number, int(request.operation), *request.arguments
        self._socket.send_multipart([msgspec.msgpack.encode(part) for part in parts])

    def _map(self, registered: _Registered) -> None:
        name = registered.shm_name.strip("/")
        if not name or not registered.pool_size or "/" in name:
            raise OSError(
                errno.EIO,
                "LMCache shares no memory: start it with --supported-transfer-mode engine_driven --shm-name NAME",
            )
        try:
            descriptor = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise OSError(
                errno.EIO,
                f"LMCache's shared memory {name!r} is not here: it must run on this machine and share /dev/shm",
            ) from None
        try:
            found = os.fstat(descriptor)
            if self._memory is None or self._memory_id != (found.st_dev, found.st_ino):
                self._memory = mmap.mmap(descriptor, min(found.st_size, registered.pool_size))
                self._memory_id = found.st_dev, found.st_ino
        finally:
            os.close(descriptor)


def _converted(answer: object, kind: Any) -> Any:
    """Raises OSError if it is no such answer."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise OSError(errno.EIO, f"LMCache's answer is not one of version 0.5: {error}") from None
