"""A KV store in Redis, or a server that speaks its protocol: one value an extent.  No torch.

    inflight:kv:<namespace>:<key>   an extent, from its seal to its last byte

The server bounds its memory itself: `maxmemory`, with a `maxmemory-policy` that evicts.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from inflight.engine.tiers.base import Frames, TornError

__all__ = ["RedisStore", "without_password"]

_SECONDS = 1.0  # for an answer, or a part of a large one
_CONNECT_SECONDS = 0.5
_MAX_CONNECTIONS = 8
_T = TypeVar("_T")


def without_password(url: str) -> str:
    """The URL for logs."""
    return re.sub(r"(?<=//)[^/@]*@", "***@", re.sub(r"(?<=password=)[^&]*", "***", url))


class RedisStore:
    """Implements `KVStore`.  Connects when it is first used, and again after any failure.

    Args:
        url: `redis://[[user]:[password]@]host[:port][/database]`, `rediss://` or `unix://`.
        namespace: what the KV belongs to, as hexadecimal digits.
        password: in place of the URL's.
        seconds: for an answer, or a part of a large one.

    Raises:
        ImportError: the package `redis` is missing.
        ValueError: not a Redis URL.
    """

    def __init__(self, url: str, namespace: str, password: str | None = None, seconds: float = _SECONDS) -> None:
        self._redis: Any = importlib.import_module("redis")
        retry = importlib.import_module("redis.retry").Retry
        no_backoff = importlib.import_module("redis.backoff").NoBackoff
        options: dict[str, Any] = {} if password is None else {"password": password}
        self._client = self._redis.Redis.from_url(
            url,
            socket_timeout=seconds,
            socket_connect_timeout=min(seconds, _CONNECT_SECONDS),
            retry=retry(no_backoff(), 0),
            max_connections=_MAX_CONNECTIONS,
            **options,
        )
        self._prefix = f"inflight:kv:{namespace}:"

    @property
    def num_bytes(self) -> int:
        """0: the server knows."""
        return 0

    def find(self, keys: Sequence[bytes]) -> int:
        found = self._exist(keys)
        return next((index for index, count in enumerate(found) if not count), len(found))

    def first_of(self, keys: Sequence[bytes]) -> int:
        found = self._exist(keys)
        return next((index for index, count in enumerate(found) if count), len(found))

    def load(self, key: bytes, frames: Frames) -> bool:
        value = self._asked(lambda: self._client.get(self._name(key)))
        if value is None:
            return False
        if len(value) != (size := sum([frame.nbytes for frame in frames])):
            raise TornError(f"a value has {len(value)} bytes, and {size} were expected")
        rest = memoryview(value)
        for frame in frames:
            frame[:] = rest[: frame.nbytes]
            rest = rest[frame.nbytes :]
        return True

    def store(self, key: bytes, frames: Frames) -> bool:
        value = b"".join(frames)
        return bool(self._asked(lambda: self._client.set(self._name(key), value)))

    def drop(self, key: bytes) -> None:
        self._asked(lambda: self._client.unlink(self._name(key)))

    def close(self) -> None:
        with contextlib.suppress(self._redis.RedisError, OSError):
            self._client.close()

    def _exist(self, keys: Sequence[bytes]) -> list[int]:
        """1 for each key that it has, else 0."""

        def exist() -> list[int]:
            with self._client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.exists(self._name(key))
                return pipeline.execute()

        return self._asked(exist)

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _asked(self, ask: Callable[[], _T]) -> _T:
        """The server's answer.

        Raises:
            TimeoutError: it did not come in time.
            OSError: ENOSPC: the server is full; EIO: anything else.
        """
        errors = self._redis.exceptions
        try:
            return ask()
        except errors.TimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, f"Redis did not answer in time: {error}") from None
        except errors.OutOfMemoryError:
            raise OSError(errno.ENOSPC, "Redis is full: set its maxmemory-policy to allkeys-lru") from None
        except errors.RedisError as error:
            raise OSError(errno.EIO, f"Redis: {type(error).__name__}: {error}") from None
