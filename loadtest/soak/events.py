"""Disturbances of the server during a soak: engines are killed, models are reloaded and unloaded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import tritonclient.grpc.aio as grpc

from inflight_tools.launcher import TritonServer
from inflight_tools.processes import STUB_NAME, children, session_members
from loadtest.soak.traffic import Traffic

__all__ = ["Events"]

_STEP_SECONDS = 90.0  # within which each step of an event must succeed
_CANCEL_SECONDS = 0.2  # until cancellations that are under way have reached the server
_WORKER = "inflight.worker"  # in the command line of an engine process


class Events:
    """The disturbances; each method returns when the server has recovered.

    Models are loaded and unloaded over gRPC: over HTTP a load occupies a thread that streams need.

    Args:
        server: it runs with explicit model control.
        model: the model under load.
        model_file: its `model.json`.
        traffic: told when the server is allowed to refuse requests.

    Attributes:
        counts: events by kind.
        seconds: how long the steps of events took, by what was waited for.
    """

    def __init__(self, server: TritonServer, model: str, model_file: Path, traffic: Traffic) -> None:
        assert server.process is not None
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._pid = server.process.pid
        self._model = model
        self._model_file = model_file
        self._traffic = traffic
        self._control = grpc.InferenceServerClient(server.grpc_address)

    async def close(self) -> None:
        await self._control.close()

    async def kill_engine(self) -> None:
        """SIGKILL; another one must come, while every stream goes on."""
        victims = await asyncio.to_thread(self._engines)
        if not victims:
            return self._traffic.problem("there is no engine process to kill")
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        self.counts["kills of the engine"] += 1
        await self._until("a new engine process", lambda: set(self._engines()) - set(victims))

    async def reload(self) -> None:
        """Load the model once more: the new instance takes over, and no request must notice."""
        self._model_file.touch()  # Triton loads again only what has changed
        async with self._unloading():
            await self._step("load", self._control.load_model(self._model))
        self.counts["reloads"] += 1

    async def unload_and_load(self) -> None:
        """At once, while the old instance still works: it must finish what it has, but can refuse new requests."""
        async with self._unloading():
            self._traffic.model_away()
            await self._step("unload", self._control.unload_model(self._model))
            await self._step("load", self._control.load_model(self._model))
            self._traffic.model_away(seconds=0.0)
        self.counts["unloads and loads"] += 1

    @contextlib.asynccontextmanager
    async def _unloading(self) -> AsyncIterator[None]:
        """An instance is unloaded within the context, and gone at its end."""
        self._traffic.unloading(True)
        await asyncio.sleep(_CANCEL_SECONDS)
        old = await asyncio.to_thread(self._stubs)
        leaves = asyncio.create_task(self._until("the old stub to leave", lambda: not old & self._stubs()))
        try:
            yield
            await leaves
        finally:
            leaves.cancel()
        self._traffic.unloading(False)

    def _stubs(self) -> set[int]:
        return set(children(self._pid, STUB_NAME))

    def _engines(self) -> list[int]:
        found: list[int] = []
        for pid in session_members(self._pid):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                if _WORKER in psutil.Process(pid).cmdline():
                    found.append(pid)
        return found

    async def _step(self, what: str, call: Awaitable[object]) -> None:
        start = time.monotonic()
        try:
            await asyncio.wait_for(call, _STEP_SECONDS)
            self.seconds[what].append(time.monotonic() - start)
        except asyncio.TimeoutError:
            self._traffic.problem(f"no end of an {what} within {_STEP_SECONDS:g} s")
        except grpc.InferenceServerException as error:
            self._traffic.problem(f"{what} failed: {error}")

    async def _until(self, what: str, condition: Callable[[], object]) -> None:
        start = time.monotonic()
        while not await asyncio.to_thread(condition):
            if time.monotonic() > start + _STEP_SECONDS:
                return self._traffic.problem(f"{what} did not happen within {_STEP_SECONDS:g} s")
            await asyncio.sleep(0.05)
        self.seconds[what].append(time.monotonic() - start)
