"""Supervisor and streams around the fake engine."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
from frontend_rig import (
    FAKE_ENGINE,
    RecordingClient,
    RecordingStats,
    demo_tokenizer,
    make_request,
    wait_for,
    write_orders,
)

from inflight.config import EngineConfig
from inflight.engine.messages import DumpTrace
from inflight.frontend.engine_client.restart_policy import RestartPolicy
from inflight.frontend.engine_client.shared_engine import EngineGroup
from inflight.frontend.engine_client.supervisor import Supervisor
from inflight.frontend.output.output_processor import OutputProcessor

__all__ = ["PROMPT", "TOKENIZER", "SupervisorRig", "alive", "tokens", "wait_for"]

TOKENIZER = demo_tokenizer()
PROMPT = TOKENIZER.encode("the list of names")


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return False


class SupervisorRig:
    """Supervisor and streams around the fake engine.

    Args:
        control: file with orders for the fake engine.
        group: the stubs that share it.
    """

    def __init__(self, control: Path, group: EngineGroup | None = None, **config: Any) -> None:
        self.control = control
        self.group = group
        self.lines: list[str] = []
        self.supervisor = Supervisor(
            EngineConfig(model="fake", **config),
            lambda level, line: self.lines.append(line),
            command=FAKE_ENGINE,
            env={"FAKE_ENGINE_CONTROL": str(control)},
            restart=RestartPolicy(first_delay=0.01, longest_delay=0.05, refuse_after=2),
            launch=None if group is None else group.launch,
        )
        self.stats = RecordingStats()

    def start(self) -> SupervisorRig:
        self.ready = self.supervisor.start()
        number = 0 if self.group is None else self.group.number
        self.streams = OutputProcessor(
            TOKENIZER, self.supervisor, self.stats, self.lines.append, check_seconds=0.01, number=number
        )
        self.streams.start()
        self.supervisor.connect(self.streams)
        return self

    def order(self, **orders: str) -> None:
        write_orders(self.control, **orders)

    def watch(self, seconds: float) -> None:
        """From now on, an engine without a heartbeat for so long hangs."""
        self.supervisor._watchdog.interval = 0.1
        self.supervisor._watchdog._timeout = seconds

    def is_stopped(self) -> bool:
        """Whether SIGSTOP has stopped the engine process."""
        pid = self.supervisor.pid
        return pid is not None and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def open(self, orders: str = "", stream: bool = True, **params: Any) -> RecordingClient:
        client = RecordingClient()
        fields = {"tenant": orders, **params.pop("fields", {})}
        self.streams.open(
            make_request(PROMPT, returns={"return_token_ids"}, stream=stream, fields=fields, **params), client
        )
        return client

    def ask(self) -> Future[Any]:
        return self.supervisor.ask(DumpTrace())

    def stop(self) -> None:
        self.supervisor.stop()
        if self.group is not None:
            self.group.leave()
        self.streams.stop("over")


def tokens(client: RecordingClient) -> list[int]:
    return [token for response in client.responses for token in response["token_ids"].tolist()]
