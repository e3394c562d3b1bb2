"""A forwarder between an engine that reads and the one that is read: a test can strike within an answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from forwarder import Forwarder
from redis_rig import free_port

__all__ = ["PeerLink"]


class PeerLink(Forwarder):
    """Forwards to an engine's `kv_listen`, whether that is there or not.

    Attributes:
        listens: `host:port` of that engine.
        url: for the tier that reads it.
        num_bytes: of its answers, so far.
    """

    def __init__(self) -> None:
        self.listens = f"127.0.0.1:{free_port()}"
        super().__init__(free_port(), self.listens)
        self.url = f"tcp://{self.address}"
        self.num_bytes = 0
        self._strike: tuple[int, Callable[[], object], threading.Event] | None = None
        self._flips_at: int | None = None
        self._open = threading.Event()
        self._open.set()

    def strike_after(self, num_bytes: int, strike: Callable[[], object]) -> threading.Event:
        """Call `strike`, and set the event, before answers go on behind so many more bytes."""
        done = threading.Event()
        self._strike = self.num_bytes + num_bytes, strike, done
        return done

    def flip_after(self, num_bytes: int) -> None:
        """Change a bit behind so many more bytes of answers."""
        self._flips_at = self.num_bytes + num_bytes

    def hold(self) -> None:
        """Pass nothing on until `go_on`."""
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        try:
            target_reader, target_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._copy(reader, target_writer), self._answer(target_reader, writer))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := bytearray(await reader.read(16384)):
                self._meet(data)
                while not self._open.is_set():
                    await asyncio.sleep(0.005)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def _meet(self, data: bytearray) -> None:
        """The next bytes of an answer are there."""
        start, self.num_bytes = self.num_bytes, self.num_bytes + len(data)
        if self._flips_at is not None and self.num_bytes > self._flips_at:
            data[max(0, self._flips_at - start)] ^= 1
            self._flips_at = None
        if self._strike is not None and self.num_bytes > self._strike[0]:
            _, strike, done = self._strike
            self._strike = None
            strike()
            done.set()
