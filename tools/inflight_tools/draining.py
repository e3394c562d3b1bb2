"""Lets the models of a server on this machine finish what they have, before the server is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from inflight.frontend.lifecycle.instance_registry import children_of, states_of
from inflight_tools.processes import STUB_NAME, children

__all__ = ["drain_models"]

_POLL_SECONDS = 0.05


def drain_models(server: int, timeout: float, check: Callable[[], None] = lambda: None) -> bool:
    """Have every model of the `inflight` backend refuse new requests, and wait until the open ones have ended.

    Triton itself stops its HTTP service at once when it is told to stop, and what streams there breaks.

    Args:
        server: process id of tritonserver.
        timeout: seconds to wait; each model's `drain_timeout` bounds them, too.
        check: called at each look; an exception that it raises ends the wait.

    Returns:
        Whether all stubs have drained, so that nothing runs in the server.
    """
    deadline = time.monotonic() + timeout
    for pid in _serving(server):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    while _serving(server):
        if time.monotonic() >= deadline:
            return False
        check()
        time.sleep(_POLL_SECONDS)
    return all(any(states_of(pid)) for pid in children(server, STUB_NAME))  # no other Python model, none that died


def _serving(server: int) -> list[int]:
    """The stubs that have not drained."""
    return [pid for pid in children_of(server) if any(entry.state != "drained" for entry in states_of(pid))]
