"""Servers that this user runs on this machine: where they listen, and their admin keys.

`inflight serve` writes a file of each server, which only this user can read, and removes it when the server ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["ADMIN_HEADER", "GRPC_PREFIX", "admin_headers", "announced", "key_of"]

ADMIN_HEADER = "inflight-admin-key"
GRPC_PREFIX = "triton-grpc-protocol-"  # Triton puts it in front of the header's name

_LOOPBACK = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


@contextlib.contextmanager
def announced(addresses: Sequence[str], admin_key: str | None) -> Iterator[None]:
    """Keep the file of a server that runs as long as the context; without a folder of this user's alone there is none.

    Args:
        addresses: `host:port` of its services.
    """
    folder, file = _folder(), None
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder):
            file = folder / f"{os.getpid()}.json"
            file.touch(mode=0o600)
            file.write_text(json.dumps({"addresses": list(addresses), "admin_key": admin_key}), encoding="utf-8")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if file is not None:
                file.unlink(missing_ok=True)
            folder.rmdir()  # fails while another server is there


def key_of(url: str) -> str | None:
    """The admin key of the server at `url`, if this user runs it on this machine."""
    wanted = _normal(url.rpartition("://")[2])
    folder = _folder()
    if not _is_private(folder):
        return None
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            if not _runs(int(file.stem)):
                file.unlink(missing_ok=True)
                continue
            found = json.loads(file.read_text(encoding="utf-8"))
            if wanted in map(_normal, found["addresses"]):
                return found["admin_key"]
    return None


def admin_headers(protocol: str, key: str | None) -> dict[str, str]:
    """Headers for Triton's management endpoints; none without a key."""
    prefix = GRPC_PREFIX if protocol == "grpc" else ""
    return {} if key is None else {prefix + ADMIN_HEADER: key}


def _folder() -> Path:
    """https://specifications.freedesktop.org/basedir-spec/latest/"""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(runtime or state) / "inflight"


def _is_private(folder: Path) -> bool:
    """Only this user can put a file there, and read it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _normal(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"
