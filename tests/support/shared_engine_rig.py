"""Stubs that share an engine process: where they meet, and what one of them does."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Any

from frontend_rig import FAKE_ENGINE, wait_for, write_orders

from inflight.config import EngineConfig
from inflight.engine.messages import AddRequest, EngineReady, StepMessage, encode
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.engine_client.shared_engine import EngineGroup, SharedEngine

__all__ = [
    "CONFIG",
    "Place",
    "alive",
    "answer",
    "ask",
    "read_to_the_end",
    "sockets",
    "start",
    "wait_for",
]

CONFIG = EngineConfig(model="fake", spare_engine=False)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def sockets(name: str) -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if name in line]


class Place:
    """Where stubs meet, and the groups that were made there."""

    def __init__(self, folder: Path) -> None:
        self.name = f"inflight-test-{uuid.uuid4().hex}"
        self.control = folder / "control.json"
        self.groups: list[EngineGroup] = []

    def group(self, instance: str, **options: Any) -> EngineGroup:
        env = {"FAKE_ENGINE_CONTROL": str(self.control)}
        command = options.pop("command", FAKE_ENGINE)
        group = EngineGroup(options.pop("config", CONFIG), command, env, self.name, instance, **options)
        self.groups.append(group)
        return group

    def order(self, **orders: str) -> None:
        write_orders(self.control, **orders)

    def processes(self) -> list[int]:
        """Ids of the processes with this place's control file."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.control).encode() in (folder / "environ").read_bytes() and alive(int(folder.name)):
                    found.append(int(folder.name))
        return found


def start(group: EngineGroup) -> SharedEngine:
    engine = group.launch()
    assert isinstance(engine.wait_ready(60), EngineReady)
    return engine


def ask(engine: SharedEngine, request_id: int, prompt: list[int], orders: str = "", max_tokens: int = 5) -> None:
    engine.send(encode(AddRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), tenant=orders)))


def answer(engine: SharedEngine) -> list[int]:
    tokens: list[int] = []
    while True:
        message = engine.receive()
        assert isinstance(message, StepMessage)
        for delta in message.deltas:
            tokens += delta.token_ids
            if delta.finish_reason:
                return tokens


def read_to_the_end(engine: SharedEngine) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            engine.receive()
