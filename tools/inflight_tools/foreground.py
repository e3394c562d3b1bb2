"""Runs a server in the foreground of a terminal, and successors of it when it dies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import typer

from inflight_tools.causes import OutOfMemory, cause
from inflight_tools.installation import LauncherError
from inflight_tools.restart import Restarts
from inflight_tools.terminal import StopRequest, echo_file, one_line_errors, stop_signals
from inflight_tools.watch import Watch

if TYPE_CHECKING:
    from inflight_tools.gateway_process import GatewayProcess
    from inflight_tools.launcher import TritonServer

__all__ = ["ServerDied", "run_in_foreground", "run_until_death"]

_LOG_BYTES = 64 * 1024  # of the log's end, where the cause is looked for


class ServerDied(LauncherError):
    """A server that was ready died or hung; the message says why."""

    status = 3


def run_in_foreground(
    server: TritonServer, timeout: float, restarts: Restarts | None = None, gateway: GatewayProcess | None = None
) -> None:
    """Run `server`, and successors of it when it dies, with their log on stderr.

    Returns on a stop signal.  Exits with status 1 if the server cannot be started, and with 3 if it was
    ready, died and may not be started again.

    Args:
        server: not started.
        timeout: seconds that models may take to load.
        restarts: how often it may be started again; None for never.
        gateway: to be started once the server is ready; it ends with the last server.
    """
    restarts = restarts or Restarts(0)
    with stop_signals() as stop, one_line_errors(), contextlib.ExitStack() as stack:
        if gateway is not None:
            stack.callback(gateway.stop)
        while True:
            error = _end_of(server, timeout, stop, gateway)
            if not isinstance(error, ServerDied) and not restarts.count:  # it has never been ready
                raise error
            server = _next(server, restarts, error)
            stop.check()


def _end_of(server: TritonServer, timeout: float, stop: StopRequest, gateway: GatewayProcess | None) -> LauncherError:
    """Run a server until it dies; returns why it did or why it could not be started."""
    try:
        _serve_once(server, timeout, stop, gateway)
    except LauncherError as error:
        return error


def _next(server: TritonServer, restarts: Restarts, error: LauncherError) -> TritonServer:
    """Wait as `restarts` say; returns the server to start.  Raises ServerDied if there were too many."""
    pause = restarts.next_pause()
    if pause is None:
        often = f" (restarted {restarts.count} times in {restarts.window:g} s: --restart)" if restarts.limit else ""
        raise ServerDied(f"{error}{often}") from None
    which = f"restart {restarts.count} of at most {restarts.limit} in {restarts.window:g} s"
    typer.echo(f"inflight: {error}; {which} follows in {pause:g} s", err=True)
    time.sleep(pause)
    return server.successor()


def _serve_once(server: TritonServer, timeout: float, stop: StopRequest, gateway: GatewayProcess | None) -> NoReturn:
    """Raises ServerDied, or a LauncherError if the server did not become ready."""
    end: Callable[[], None] = server.kill  # until it is ready nothing runs
    try:
        out_of_memory = OutOfMemory()
        server.start()
        assert server.log_file is not None
        with echo_file(server.log_file, server.log_start):
            server.wait_ready(timeout, stop.check)
            end = partial(server.stop, stop.check_again)
            if gateway is not None:
                gateway.start(server.grpc_address, stop.check)
                typer.echo(f"ready: OpenAI's API at {gateway.url}")
            typer.echo(
                f"ready: HTTP {server.http_address}, gRPC {server.grpc_address}, "
                f"metrics http://{server.metrics_address}/metrics; press Ctrl-C to stop"
            )
            run_until_death(server, timeout, out_of_memory, stop, gateway)
    except KeyboardInterrupt:
        if gateway is not None:
            gateway.stop()  # first, so that its open requests can finish
        raise
    finally:
        end()


def run_until_death(
    server: TritonServer,
    timeout: float,
    out_of_memory: OutOfMemory,
    stop: StopRequest,
    gateway: GatewayProcess | None = None,
) -> NoReturn:
    """Watch a server that is ready.  When it has died or hangs, end it at once, so that no client waits in vain.

    Raises:
        ServerDied: always, unless the gateway cannot be kept alive: LauncherError.
    """

    def check() -> None:
        stop.check()
        if gateway is not None:
            gateway.check()

    death = Watch(server, timeout).wait(check)
    server.kill()
    raise ServerDied(cause(death, server.log_text()[-_LOG_BYTES:], out_of_memory))
