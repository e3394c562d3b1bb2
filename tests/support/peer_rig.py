"""An engine's host memory that others read, without the engine: in this process, or in one that can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from extents import content, frames_of, key
from redis_rig import free_port

from inflight.engine.tiers.seal import Seal
from inflight.runner.stores.host import HostStore
from inflight.runner.stores.peer_server import PeerServer
from inflight.runner.stores.peer_store import PeerStore

__all__ = ["NAMESPACE", "SIZE", "PeerProcess", "PeerRig", "readable", "wait_until_it_listens"]

NAMESPACE = bytes(range(16))
SIZE = 2**20
_COUNT = 20  # extents of a process


class PeerRig:
    """A store that is served by a thread of this process.

    Attributes:
        coming: keys that are about to be stored.
    """

    def __init__(
        self,
        namespace: bytes = NAMESPACE,
        secret: bytes = b"",
        port: int = 0,
        max_bytes: int = 2**30,
        address: str = "127.0.0.1",
    ) -> None:
        self.host, self.coming, self.port = HostStore(max_bytes), set[bytes](), port or free_port()
        self.server = PeerServer(address, self.port, self.host, lambda key: key in self.coming, namespace, secret)
        wait_until_it_listens(self.port, address)

    def store(self, namespace: bytes = NAMESPACE, secret: bytes = b"", seconds: float = 30.0) -> PeerStore:
        """One that reads it."""
        return PeerStore("127.0.0.1", self.port, namespace, secret, seconds)

    def close(self) -> None:
        self.server.close()

    def __enter__(self) -> PeerRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PeerProcess:
    """A process that serves extents 0 to 19, sealed, each of `SIZE` bytes without its seal."""

    def __init__(self, port: int = 0) -> None:
        self.port = port or free_port()
        self._process = subprocess.Popen([sys.executable, __file__, str(self.port)])
        wait_until_it_listens(self.port)

    def stop(self) -> None:
        """As a machine that hangs: connections stay, and no answer comes."""
        os.kill(self._process.pid, signal.SIGSTOP)
        while Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def wait_until_it_listens(port: int, address: str = "127.0.0.1") -> None:
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as client:
            if client.connect_ex((address, port)) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def readable(rig: PeerRig, *numbers: int, size: int = SIZE) -> Iterator[PeerStore]:
    """Extents of these numbers, and a store that reads them."""
    for number in numbers:
        rig.host.store(key(number), frames_of(content(number, size)))
    store = rig.store()
    try:
        yield store
    finally:
        store.close()


def _serve(port: int) -> None:
    host, seal = HostStore(2**30), Seal(NAMESPACE)
    for number in range(_COUNT):
        data = memoryview(content(number, SIZE))
        host.store(key(number), [memoryview(seal.made(key(number), [data])), data])
    PeerServer("127.0.0.1", port, host, lambda key: False, NAMESPACE, b"")
    signal.pause()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
