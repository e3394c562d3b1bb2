"""The interface through which a response reaches its client.  No Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from inflight.frontend.errors import ErrorCode

__all__ = ["Responder"]


class Responder(Protocol):
    """Sends responses to one client."""

    def prepare(self, outputs: dict[str, np.ndarray], final: bool) -> Callable[[], None]:
        """Make a response; the function that is returned does the rest of `send`."""

    def send(self, outputs: dict[str, np.ndarray], final: bool) -> None:
        """Send one response; `final` is the FINAL flag.  Raises if the client cannot be reached."""

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send one error response with the FINAL flag."""

    def is_cancelled(self) -> bool:
        """Whether the client cancelled; once true, always true."""
