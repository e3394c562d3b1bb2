"""An LMCache server for tests: a fake, or a real one if INFLIGHT_LMCACHE is the command of a Python that has it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from redis_rig import free_port

__all__ = ["LMCacheServer"]

_REAL = shlex.split(os.environ.get("INFLIGHT_LMCACHE", ""))
_COMMAND = (
    [*_REAL, "-m", "lmcache.v1.multiprocess.server"]
    if _REAL
    else [
        sys.executable,
        str(Path(__file__).with_name("fake_lmcache.py")),
    ]
)
_MAGIC = b"INFLKV\x00\x01"  # of a seal
_numbers = itertools.count()


class LMCacheServer:
    """Listens on a port of its own, and keeps objects in memory.

    Args:
        folder: for its log.
        options: of its command line.
        gigabytes: of memory.
        port: to listen on; 0: a free one.
    """

    is_real = bool(_REAL)

    def __init__(self, folder: Path, *options: str, gigabytes: float = 0.0625, port: int = 0) -> None:
        self.port = port or free_port()
        self._log = folder / "lmcache.log"
        self._name = f"inflight_test_{os.getpid()}_{next(_numbers)}"
        self._command = [
            *(*_COMMAND, "--host", "127.0.0.1", "--port", str(self.port), "--l1-size-gb", str(gigabytes)),
            *("--supported-transfer-mode", "engine_driven", "--shm-name", self._name, "--no-l1-use-lazy"),
            *("--eviction-policy", "LRU", "--disable-observability", *options),
        ]

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def memory(self) -> Path:
        """The file that it shares, with the bytes of all objects."""
        return Path(f"/dev/shm/lmcache_l1_pool_{self._name}")

    def size(self) -> int:
        """Extents that it has, or is about to have."""
        return self.memory.read_bytes().count(_MAGIC)

    def __enter__(self) -> LMCacheServer:
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
        if self.is_real:
            environment.pop("PYTHONPATH", None)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + 90
        while not _listens(self.port):
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def stop(self) -> None:
        """As a machine that hangs: connections stay, and no answer comes."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(FileNotFoundError):
            self.memory.unlink()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
