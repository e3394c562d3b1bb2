"""The supervisor's interface to an engine process, its own or a shared one.  No torch, no Triton."""

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
        """Call `told`, now and after every change, with whether this frontend can send requests: after a death, the
        frontends that share the engine process take turns to find out which of their requests can run again."""

    def end_turn(self) -> None:
        """Every request that may have caused the death has run again, or there was none."""

    def kill(self, reason: str) -> None:
        """End it at once, even if it is stopped or hangs; `exit_text` then returns the reason."""

    def exit_text(self) -> str:
        """How it ended, in a few words.  Blocks until it has ended."""

    def stop(self, polite: bool = True) -> None:
        """It is no longer needed.  Safe to repeat."""

    def close(self) -> None:
        """Close the pipe of a process that has ended."""
