"""The gateway beside a server: a child process that lives as long as `inflight serve`."""

from __future__ import annotations

import contextlib
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace

import msgspec

from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions
from inflight_tools.installation import LauncherError, ServerDied
from inflight_tools.processes import how_it_ended

__all__ = ["GatewayProcess"]

_START_SECONDS = 60.0
_STOP_SECONDS = 5.0  # beyond the time that open requests have
_POLL_SECONDS = 0.05


class GatewayProcess:
    """Starts and stops a gateway.

    Args:
        options: without the addresses of Triton.
        server: where it listens; the port must not be 0.

    Call it from the main thread only: the kernel ends the gateway together with the thread that started it.
    """

    def __init__(self, options: GatewayOptions, server: ServerOptions) -> None:
        self._options = options
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The `base_url` for clients."""
        host = f"[{self._server.host}]" if ":" in self._server.host else self._server.host
        scheme = "http" if self._server.ssl_keyfile is None else "https"
        return f"{scheme}://{host}:{self._server.port}/v1"

    @property
    def page_url(self) -> str | None:
        """The page for browsers; None if it is turned off."""
        return self.url.removesuffix("v1") if self._options.page else None

    def start(self, triton: str, check: Callable[[], None] = lambda: None) -> None:
        """Start it in front of `triton` (host:port) and wait until it answers.

        Args:
            check: called while waiting; an exception that it raises ends the wait.

        Raises:
            LauncherError: it ended, or does not answer.
        """
        self._options = replace(self._options, triton=(triton,))
        self._spawn()
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            check()
            assert self._process is not None
            if self._process.poll() is not None:
                raise LauncherError(f"the gateway ended while it started: {how_it_ended(self._process.returncode)}")
            if time.monotonic() > deadline:
                raise LauncherError(f"the gateway did not answer within {_START_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise ServerDied if it has died."""
        if self._process is not None and self._process.poll() is not None:
            raise ServerDied(f"the gateway died ({how_it_ended(self._process.returncode)})")

    def stop(self) -> None:
        """End it: open requests have `exit_timeout` to finish, unless that is interrupted.  Safe to repeat."""
        process = self._process
        if process is None:
            return
        try:
            process.terminate()
            process.wait(self._server.exit_timeout + _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
            self._process = None

    def _spawn(self) -> None:
        start = {"options": self._options, "server": self._server, "parent": os.getpid()}
        # A session of its own: Ctrl-C in a terminal reaches only this process.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inflight_gateway"], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: `start` or `check` notices
            self._process.stdin.write(msgspec.json.encode(start))
            self._process.stdin.close()

    def _answers(self) -> bool:
        own = ssl._create_unverified_context()  # its certificate names what clients call, not this address
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=own))
        try:
            with opener.open(self.url.removesuffix("/v1") + "/health", timeout=2.0) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False
