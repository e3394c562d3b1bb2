"""`kv_tiers` of a `model.json`: where KV is kept beyond the pool.  No torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["KVTier"]

_Kind = Literal["host", "disk", "redis", "lmcache", "peer"]
_PLACE = {"disk": "path", "redis": "url", "lmcache": "url", "peer": "url"}
_TCP_URL = re.compile(r"tcp://([^/:@\s]+|\[[0-9a-fA-F:.]+\]):\d{1,5}")


class KVTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One place that keeps the KV of full blocks, so that no conversation is computed twice.

    Attributes:
        type: "host": memory of the engine process; "disk": files in a folder, which engines can share; "redis": a
            server, which engines can share; "lmcache": LMCache's multiprocess server on this machine, with its media;
            "peer": the host memory of another engine, at its `kv_listen`. It is read, and never written.
        size: bytes, or a string ("4GiB"), that it may take; what was not used for longest goes first. Required for
            "host" and "disk"; a server has a limit of its own (Redis: `maxmemory`, LMCache: `--l1-size-gb`).
        path: of "disk": the folder. It is made if it does not exist, and only its owner can read it.
        url: of "redis": redis://, rediss:// or unix://; of "lmcache" and "peer": tcp://host:port. A host name of a
            "peer" stands for the engines at all of its addresses.
        password_file: of "redis": a file with the password in its first line, in place of one in `url`.
        write: "all" keeps every extent as soon as it is computed, and the last part when its request ends; "second"
            only extents computed for the second time, not found, for a medium that wears out.
    """

    type: _Kind
    size: Annotated[int, Meta(ge=1, le=2**62)] | str | None = None
    path: str | None = None
    url: str | None = None
    password_file: str | None = None
    write: Literal["all", "second"] = "all"

    def __post_init__(self) -> None:
        if self.size is None and self.type in ("host", "disk"):
            raise ValueError(f'type="{self.type}" needs size: bytes, or a string such as "4GiB"')
        needed = _PLACE.get(self.type)
        for name, given in (("path", self.path), ("url", self.url)):
            if name == needed and not given:
                raise ValueError(f'type="{self.type}" needs {name}')
            if name != needed and given is not None:
                raise ValueError(f'type="{self.type}" has no {name}; remove it')
        if self.password_file is not None and self.type != "redis":
            raise ValueError(f'type="{self.type}" has no password_file; remove it')
        if self.type == "redis" and not (self.url or "").startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("url must start with redis://, rediss:// or unix://")  # it can contain a password
        if self.type in ("lmcache", "peer") and not _TCP_URL.fullmatch(self.url or ""):
            raise ValueError(f"url={self.url!r} is not like tcp://127.0.0.1:5555")
