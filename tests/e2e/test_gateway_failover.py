"""A gateway in front of two tritonservers, one of which dies in the middle of its streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from inflight_tools.launcher import TritonServer
from inflight_tools.ports import pick_ports
from inflight_tools.processes import session_members

REPOSITORY = Path(__file__).parents[2] / "model_repository"
STREAMS = 12
PROMPT = "Return a list of"


@pytest.fixture
def victim(triton_installed: None) -> Iterator[TritonServer]:
    with TritonServer(REPOSITORY, model_control_mode="explicit", load_models=["demo"], exit_timeout=5) as victim:
        yield victim


@pytest.fixture
def url(victim: TritonServer, server: TritonServer) -> Iterator[str]:
    """A gateway that prefers the victim."""
    (port,) = pick_ports(1)
    inflight = Path(sys.executable).with_name("inflight")
    command = [inflight, "gateway", "--port", str(port), "--host", "127.0.0.1"]
    gateway = subprocess.Popen([*command, "--triton", victim.grpc_address, "--triton", server.grpc_address])
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                    break
            assert time.monotonic() < deadline and gateway.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        gateway.terminate()
        gateway.wait(30)


async def text_of(client: AsyncOpenAI, index: int, begun: asyncio.Event) -> str:
    options: dict[str, Any] = {"temperature": float(index % 2), "seed": index, "max_tokens": 400 + index}
    options["extra_body"] = {"ignore_eos": True}
    if index % 3 == 2:
        begun.set()
        whole = await client.completions.create(model="demo", prompt=PROMPT, **options)
        return whole.choices[0].text
    text = ""
    async for chunk in await client.completions.create(model="demo", prompt=PROMPT, stream=True, **options):
        text += chunk.choices[0].text
        begun.set()
    return text


async def ask_all(client: AsyncOpenAI) -> tuple[list[asyncio.Task[str]], list[asyncio.Event]]:
    begun = [asyncio.Event() for _ in range(STREAMS)]
    return [asyncio.create_task(text_of(client, index, begun[index])) for index in range(STREAMS)], begun


async def test_the_death_of_a_whole_triton_goes_unnoticed(url: str, victim: TritonServer, server: TritonServer) -> None:
    async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        tasks, _ = await ask_all(client)
        expected = await asyncio.gather(*tasks)
        tasks, begun = await ask_all(client)
        await asyncio.gather(*(event.wait() for event in begun))
        assert victim.process is not None
        for pid in session_members(victim.process.pid):
            os.kill(pid, signal.SIGSTOP)  # nothing more comes from it, and it cannot end anything politely
        left = [index for index, task in enumerate(tasks) if not task.done()]
        assert left, "all answers were complete before it died"
        for pid in session_members(victim.process.pid):
            os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*tasks) == expected
        again = await client.completions.create(model="demo", prompt=PROMPT, max_tokens=3)
        assert again.usage is not None and again.usage.completion_tokens == 3
