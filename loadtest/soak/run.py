"""One soak, from an empty repository to the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from inflight.config import EngineConfig
from inflight_client import AsyncClient, RetryPolicy
from inflight_tools.launcher import TritonServer
from inflight_tools.repository import write_entry
from inflight_tools.watch import wait_for_death
from loadtest.soak.cases import Answer, Case, answer_of, make_cases
from loadtest.soak.events import Events
from loadtest.soak.resources import Idle, leaks, measure
from loadtest.soak.traffic import Traffic

__all__ = ["Plan", "Verdict", "soak"]

_MODEL = "soak"
_CHECKPOINT = Path(__file__).resolve().parents[2] / "model_repository" / "demo" / "1" / "checkpoint"
# So few blocks that sequences are preempted.
_ENGINE = {
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 1024,
    "kv_cache_memory": "2MiB",
}
_SETTLE_SECONDS = 60.0  # within which an idle server must hold nothing; processes with low priority come and go slowly
_NOTICE_SECONDS = 2.0  # within which a watch notices a death

_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """The plan of a soak.

    Attributes:
        seconds: of load, with the warm-up.
        turns: instead of the time, so many events after the warm-up, one right after another; 0 for none.
        kills: kill engines too, besides reloads and unloads.
        spare: the model keeps a spare process (`spare_engine`).
        clients: requests open at a time.
        pause: seconds between two events.
        cases: different requests.
        seed: determines requests and events.
    """

    seconds: float = 1200.0
    turns: int = 0
    kills: bool = True
    spare: bool = True
    clients: int = 16
    pause: float = 8.0
    cases: int = 60
    seed: int = 1


@dataclass
class Verdict:
    """The outcome.

    Attributes:
        seconds: in all.
        counts: requests by how they ended.
        events: by kind.
        waits: seconds that the steps of events took, by what was waited for, such as "load".
        early, late: resources after the warm-up and at the end.
        problems: the first ones, in words.
    """

    seconds: float
    counts: Counter[str]
    events: Counter[str]
    waits: dict[str, list[float]]
    early: Idle | None
    late: Idle | None
    num_problems: int
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report."""
        events = ", ".join(f"{count} {kind}" for kind, count in self.events.items()) or "no event"
        lines = [f"{sum(self.counts.values()):,} requests in {self.seconds:,.0f} s; {events}"]
        lines += [f"  {count:7,} {ending}" for ending, count in self.counts.most_common()]
        for what, seconds in self.waits.items():
            lines.append(
                f"  waited for {what}: median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
            )
        if self.early is not None and self.late is not None:
            lines.append("held without requests, after the warm-up and at the end")
            for kind, before in self.early.by_kind.items():
                lines.append(f"  {kind:8} {before!s:34} {self.late.by_kind[kind]}")
            lines.append(f"  {'shm':8} {_shm(self.early):34} {_shm(self.late)}")
            lines.append(f"  {'blocks':8} {self.early.blocks:<34.0f} {self.late.blocks:.0f}")
        lines += [f"PROBLEM {problem}" for problem in self.problems]
        more = self.num_problems - len(self.problems)
        lines += [f"PROBLEM and {more} more"] if more else []
        return [*lines, "passed" if not self.num_problems else f"failed: {self.num_problems} problems"]


def _shm(idle: Idle) -> str:
    return f"{idle.shm[0]} files, {idle.shm[1] / 2**20:.1f} MiB"


def soak(plan: Plan, log_file: Path | None, say: Callable[[str], None]) -> Verdict:
    """Start a server, load it as planned and judge.

    Args:
        log_file: of the server; None for none.
        say: takes lines on the progress.

    Raises:
        LauncherError: the server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="inflight-soak-") as folder:
        config = EngineConfig(model=str(_CHECKPOINT), spare_engine=plan.spare, **_ENGINE)  # type: ignore[arg-type]
        write_entry(Path(folder), _MODEL, config)
        server = TritonServer(
            folder, model_control_mode="explicit", load_models=[_MODEL], exit_timeout=10, log_file=log_file
        )
        with server:
            return asyncio.run(_run(plan, server, say))


async def _run(plan: Plan, server: TritonServer, say: Callable[[str], None]) -> Verdict:
    return await _Soak(plan, server, say).run()


class _ServerDied(Exception):
    """The message says which process died, and how."""


class _Soak:
    """A soak of a server that is ready."""

    def __init__(self, plan: Plan, server: TritonServer, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._server = server
        self._say = say
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> Verdict:
        started = time.monotonic()
        samples: list[Idle] = []
        async with contextlib.AsyncExitStack() as stack:
            clients = {name: await stack.enter_async_context(client) for name, client in self._clients().items()}
            traffic = Traffic(clients, await self._known_answers(clients["grpc"]), self._plan.seed)
            events = Events(self._server, _MODEL, self._server.repositories[0] / _MODEL / "1" / "model.json", traffic)
            stack.push_async_callback(events.close)
            threading.Thread(target=self._watch, args=(asyncio.get_running_loop(),), name="watch", daemon=True).start()
            load = asyncio.create_task(traffic.run(self._plan.clients))
            try:
                for phase in (self._warm_up, self._main_part):
                    await self._unless_dead(self._under_load(phase(events, started), traffic))
                    samples.append(await self._unless_dead(self._idle(traffic)))
                    self._say(f"{time.monotonic() - started:6.0f} s: {sum(traffic.counts.values()):,} requests")
            except _ServerDied as death:
                traffic.problem(str(death))
            finally:
                load.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await load
        early, late = samples if len(samples) == 2 else (None, None)
        for leak in leaks(early, late) if early is not None and late is not None else ():
            traffic.problem(leak)
        seconds = time.monotonic() - started
        return Verdict(
            seconds, traffic.counts, events.counts, dict(events.seconds), early, late, traffic.num_problems,
            traffic.problems,
        )  # fmt: skip

    def _clients(self) -> dict[str, AsyncClient]:
        once = RetryPolicy(max_attempts=1)
        return {
            "grpc": AsyncClient(self._server.grpc_address, protocol="grpc", model=_MODEL, retries=once),
            "http": AsyncClient(self._server.http_address, protocol="http", model=_MODEL, retries=once),
        }

    async def _known_answers(self, client: AsyncClient) -> list[tuple[Case, Answer]]:
        """Each case's answer when the server has nothing else to do."""
        cases = make_cases(self._plan.cases, self._plan.seed)
        return [(case, answer_of(await client.generate(case.prompt, **case.options))) for case in cases]

    # -- phases ----------------------------------------------------------------------------

    async def _warm_up(self, events: Events, started: float) -> None:
        """Each kind of event once, and a tenth of the time."""
        for event in dict.fromkeys(self._kinds(events)):
            await event()
        if not self._plan.turns:
            await asyncio.sleep(self._plan.seconds / 10)

    async def _main_part(self, events: Events, started: float) -> None:
        for number, event in enumerate(itertools.cycle(self._kinds(events))):
            if number % 10 == 0:
                self._say(f"{time.monotonic() - started:6.0f} s: {number} events")
            if self._plan.turns:
                if number == self._plan.turns:
                    return
            else:
                left = self._plan.seconds - (time.monotonic() - started)
                if left <= 0:
                    return
                await asyncio.sleep(min(self._plan.pause, left))
            await event()

    def _kinds(self, events: Events) -> tuple[Callable[[], Awaitable[None]], ...]:
        kills = (events.kill_engine,) if self._plan.kills else ()
        return events.reload, *kills, events.unload_and_load, *kills

    async def _under_load(self, phase: Awaitable[None], traffic: Traffic) -> None:
        traffic.resume()
        await phase
        await traffic.pause()

    async def _idle(self, traffic: Traffic) -> Idle:
        """Measure once everything is given back; when that takes too long, measure what is left."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            await asyncio.sleep(0.5)  # gauges are published twice a second
            idle = await asyncio.to_thread(measure, self._server, _MODEL)
            if idle.is_settled(self._plan.spare) or time.monotonic() > deadline:
                return idle

    # -- the server's death ----------------------------------------------------------------

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        text = wait_for_death(self._server)
        with contextlib.suppress(RuntimeError):  # the soak is over, and the server was stopped
            loop.call_soon_threadsafe(self._death.set_result, text)

    async def _unless_dead(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`.  Raises _ServerDied if the server dies first."""
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self._death), return_when=asyncio.FIRST_COMPLETED)
        if task.done() and task.exception() is not None:  # perhaps for the same reason
            await asyncio.wait((self._death,), timeout=_NOTICE_SECONDS)
        if self._death.done():
            task.cancel()
            raise _ServerDied(self._death.result())
        return task.result()
