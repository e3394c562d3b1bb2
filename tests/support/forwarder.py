"""A TCP forwarder in front of a server; it can terminate TLS."""

from __future__ import annotations

import asyncio
import ssl
import threading
from types import TracebackType


class Forwarder:
    """Copies bytes between 127.0.0.1:`port` and `target` ("host:port") while the context is open."""

    def __init__(self, port: int, target: str, tls: ssl.SSLContext | None = None) -> None:
        self.address = f"127.0.0.1:{port}"
        self._port, self._target, self._tls = port, target, tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        target_reader, target_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._copy(reader, target_writer), self._copy(target_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    def __enter__(self) -> Forwarder:
        self._thread.start()
        serving = asyncio.start_server(self._serve, "127.0.0.1", self._port, ssl=self._tls)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
