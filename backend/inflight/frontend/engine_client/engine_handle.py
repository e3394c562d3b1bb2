"""What the supervisor needs of an engine process, whoever owns it.  No torch, no Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from inflight.engine.heartbeat import Heartbeat
from inflight.engine.messages import EngineReady, ToFrontend

__all__ = ["EngineHandle"]


class EngineHandle(Protocol):
    """One engine process, from start to exit."""

    @property
    def pid(self) -> int: ...

    @property
    def heartbeat(self) -> Heartbeat: ...

    def wait_ready(self, timeout: float) -> EngineReady:
        """Block until the checkpoint is loaded; raises EngineStartError if it never will be."""

    def send(self, frame: bytes) -> None:
        """Raises OSError if the process is gone."""

    def receive(self) -> ToFrontend:
        """The next message.  Raises EOFError or OSError if the process is gone."""

    def watch_turns(self, told: Callable[[bool], None]) -> None:
        """Tell, now and whenever it changes, whether requests may be sent: after a death, each frontend that shares
        the engine process has its turn to find out which of its requests may be run again."""

    def end_turn(self) -> None:
        """Every request that may have caused a death has run again, or there was none."""

    def kill(self, reason: str) -> None:
        """End it at once, even if it is stopped or hangs; `exit_text` will say the reason."""

    def exit_text(self) -> str:
        """How it ended, in a few words.  Blocks until that is known."""

    def stop(self, polite: bool = True) -> None:
        """Need it no longer.  Safe to repeat."""

    def close(self) -> None:
        """Close the pipe of a process that has ended."""
