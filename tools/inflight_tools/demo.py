"""The demo of `make run`: prompts of different lengths arrive one after another and share the batch.

Every row is a request on a gRPC stream of its own.  A request joins the batch at the next forward pass
after its arrival, whatever the others are doing, and leaves it with its last token.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inflight_client import AsyncClient
from inflight_tools.launcher import LauncherError, TritonServer

__all__ = ["DemoRequest", "call_commands", "demo_requests", "run_demo"]

_MODEL = "demo"
_TEXT_WIDTH = 60  # characters shown of a row's text
_REDRAW_SECONDS = 1 / 12
_STATE_STYLES = {"": "dim", "waiting": "yellow", "running": "bold green", "done": "cyan"}


@dataclass
class DemoRequest:
    """A request of the demo.

    Attributes:
        prompt: the text to continue.
        max_tokens: number of output tokens.
        arrives_after: number of tokens of the first request after which this one is sent, so that the
            overlap is the same on slow and fast machines.
        state: "" before it arrives, "waiting" until its first token, then "running" and "done".
        submitted, first_token, finished: `time.perf_counter()` seconds; 0.0 until then.
        tokens: output tokens so far.
        text: output text so far.
    """

    prompt: str
    max_tokens: int
    arrives_after: int
    state: str = ""
    submitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    tokens: int = 0
    text: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.first_token - self.submitted if self.first_token else None

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second since the request was sent."""
        if not self.tokens:
            return None
        return self.tokens / ((self.finished or time.perf_counter()) - self.submitted)


def demo_requests() -> list[DemoRequest]:
    """The requests of the demo: short and long ones that overlap."""
    return [
        DemoRequest("This module provides a class that", 400, 0),
        DemoRequest("Return a new list containing", 60, 40),
        DemoRequest("Raise ValueError if the argument is not", 200, 80),
        DemoRequest("The following functions read and write files. Each of them takes a path and", 240, 120),
        DemoRequest("Create a socket and", 40, 150),
        DemoRequest("If the optional argument is true, then", 120, 250),
    ]


def run_demo(server: TritonServer, console: Console | None = None) -> list[DemoRequest]:
    """Stream the requests over gRPC, show their progress, then print how to call the server.

    A terminal shows a live table; without one, each event is a plain line.

    Raises:
        LauncherError: a request failed.
    """
    console = console or Console()
    rows = demo_requests()
    console.print(f"{len(rows)} requests, one batch: each joins when it arrives and leaves with its last token\n")
    with _table(console, rows) if console.is_terminal else _lines(console, rows) as on_event:
        try:
            asyncio.run(_play(server.grpc_address, rows, on_event))
        except Exception as error:  # of whatever kind: the user gets one line
            raise LauncherError(f"a request of the demo failed: {error}") from error
    console.print("\nThe server is running. Call it from another terminal:\n")
    for command in call_commands(server):
        console.print(command + "\n", markup=False, highlight=False, soft_wrap=True)
    return rows


def call_commands(server: TritonServer) -> list[str]:
    """Shell commands that call the demo model of `server`: with curl, `inflight generate` and Python."""
    url = f"http://{server.http_address}/v2/models/{_MODEL}"
    prompt, sampling = "Return the number of", '"temperature": 0.7, "max_tokens": 40'
    return [
        f"""curl -s {url}/generate -d '{{"text_input": "{prompt}", {sampling}}}'""",
        f"""curl -sN {url}/generate_stream -d '{{"text_input": "{prompt}", "stream": true, {sampling}}}'""",
        f'{_program("inflight")} generate "{prompt}" --max-tokens 40 --url {server.grpc_address} --model {_MODEL}',
        f"""{_program("python")} - <<'END'
from inflight_client import Client
with Client("{server.grpc_address}", model="{_MODEL}") as client:
    for chunk in client.stream("{prompt}", max_tokens=40, temperature=0.7):
        print(chunk.text, end="", flush=True)
END""",
    ]


def _program(name: str) -> str:
    """The command with which a shell in the current folder starts a program of the running environment."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        return name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


# Called with a request and one of "joined", "first token", "token", "left".
_OnEvent = Callable[[DemoRequest, str], None]


async def _play(address: str, rows: list[DemoRequest], on_event: _OnEvent) -> None:
    async with AsyncClient(address, model=_MODEL) as client:
        followers = [(row, asyncio.Event()) for row in rows[1:]]

        def on_first(row: DemoRequest, event: str) -> None:
            on_event(row, event)
            for follower, go in followers:
                if row.tokens >= follower.arrives_after or event == "left":
                    go.set()

        async def follow(row: DemoRequest, go: asyncio.Event) -> None:
            await go.wait()
            await _stream(client, row, on_event)

        await asyncio.gather(_stream(client, rows[0], on_first), *(follow(row, go) for row, go in followers))


async def _stream(client: AsyncClient, row: DemoRequest, on_event: _OnEvent) -> None:
    row.state, row.submitted = "waiting", time.perf_counter()
    on_event(row, "joined")
    # The planned lengths must hold whatever the model generates.
    n = row.max_tokens
    async for chunk in client.stream(row.prompt, temperature=0.7, seed=7, min_tokens=n, max_tokens=n):
        if not row.first_token:
            row.state, row.first_token = "running", time.perf_counter()
            on_event(row, "first token")
        row.tokens += chunk.choices[0].num_tokens
        row.text += chunk.text
        on_event(row, "token")
    row.state, row.finished = "done", time.perf_counter()
    on_event(row, "left")


@contextmanager
def _table(console: Console, rows: list[DemoRequest]) -> Iterator[_OnEvent]:
    """A live table with a row per request, redrawn at most every `_REDRAW_SECONDS`."""
    drawn = 0.0
    with Live(_draw(rows), console=console, auto_refresh=False) as live:

        def redraw(row: DemoRequest, event: str) -> None:
            nonlocal drawn
            if event != "token" or time.perf_counter() - drawn > _REDRAW_SECONDS:
                live.update(_draw(rows), refresh=True)
                drawn = time.perf_counter()

        yield redraw
        live.update(_draw(rows), refresh=True)


def _draw(rows: list[DemoRequest]) -> Table:
    running = sum(row.state in ("waiting", "running") for row in rows)
    table = Table(title=f"in the batch: {running}", title_justify="left", expand=True, box=None, pad_edge=False)
    for header in ("prompt", "state", "tokens", "TTFT ms", "tok/s"):
        right = header not in ("prompt", "state")
        table.add_column(header, justify="right" if right else "left", no_wrap=True, max_width=24)
    table.add_column("text", no_wrap=True, ratio=1)
    for row in rows:
        ttft, rate = row.ttft, row.tokens_per_second
        table.add_row(
            row.prompt,
            Text(row.state or "-", style=_STATE_STYLES[row.state]),
            f"{row.tokens}/{row.max_tokens}",
            "" if ttft is None else f"{ttft * 1e3:.0f}",
            "" if rate is None else f"{rate:.0f}",
            Text(_tail(row.text)),
        )
    return table


@contextmanager
def _lines(console: Console, rows: list[DemoRequest]) -> Iterator[_OnEvent]:
    """A plain line whenever a request joins, gets its first token, or leaves."""
    start = time.perf_counter()

    def line(row: DemoRequest, event: str) -> None:
        if event == "token":
            return
        running = sum(other.state in ("waiting", "running") for other in rows)
        about = f"{row.prompt!r}, up to {row.max_tokens} tokens"
        if event == "first token" and row.ttft is not None:
            about = f"after {row.ttft * 1e3:.0f} ms"
        elif event == "left":
            about = f"{row.tokens} tokens, {row.tokens_per_second or 0:.0f} tokens/s: {_tail(row.text)}"
        seconds = time.perf_counter() - start
        console.print(
            f"{seconds:6.2f} s  request {rows.index(row) + 1} {event:<11}  in the batch: {running}  {about}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    yield line


def _tail(text: str) -> str:
    return " ".join(text.split())[-_TEXT_WIDTH:]
