"""A real Redis server for tests."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from inflight_tools.ports import pick_ports

__all__ = ["RedisServer", "free_port", "needs_redis"]

_MISSING = [
    *([] if shutil.which("redis-server") else ["the program redis-server (apt-get install redis-server)"]),
    *([] if importlib.util.find_spec("redis") else ['the package redis (pip install "redis>=5")']),
]
needs_redis = pytest.mark.skipif(bool(_MISSING), reason=f"missing: {' and '.join(_MISSING)}")


class RedisServer:
    """Listens on a port of its own, and keeps nothing on disk.

    Args:
        folder: for its log.
        options: of its command line, such as "--maxmemory", "16mb".
        port: to listen on; 0: a free one.
    """

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.port = port or free_port()
        self._command = [
            *("redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"),
            *("--dir", str(folder), "--logfile", str(folder / "redis.log"), *options),
        ]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> RedisServer:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not _listens(self.port):
            assert self._process.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def client(self) -> Any:
        return importlib.import_module("redis").Redis(port=self.port)

    def flush(self) -> None:
        self.client().flushall()

    def size(self) -> int:
        """Keys that it has."""
        return int(self.client().dbsize())

    def stop(self) -> None:
        """As a machine that hangs: connections stay, and no answer comes."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port on which no server listens, and which the system gives to no outgoing connection."""
    return pick_ports(1)[0]
