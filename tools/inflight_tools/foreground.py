"""Runs a server in the foreground of a terminal until it is stopped or dies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import typer

from inflight.frontend.lifecycle.stub_beat import STUB_TIMEOUT
from inflight_tools.installation import ServerDied
from inflight_tools.terminal import StopRequest, echo_file, one_line_errors, stop_signals
from inflight_tools.watch import wait_for_death

if TYPE_CHECKING:
    from inflight_tools.gateway_process import GatewayProcess
    from inflight_tools.launcher import TritonServer

__all__ = ["run_in_foreground", "run_until_death"]


def run_in_foreground(
    server: TritonServer,
    timeout: float,
    gateway: GatewayProcess | None = None,
    stub_timeout: float | None = STUB_TIMEOUT,
) -> None:
    """Run `server` with its log on stderr.

    Returns on a stop signal.  Exits with status 1 if the server cannot be started, and with 3 if it was ready and
    died.

    Args:
        server: not started.
        timeout: seconds that models can take to load.
        gateway: to be started once the server is ready; it ends with the server.
        stub_timeout: see `wait_for_death`.
    """
    end: Callable[[], None] = server.kill  # until it is ready nothing runs
    with stop_signals() as stop, one_line_errors(), contextlib.ExitStack() as stack:
        stack.callback(lambda: end())
        if gateway is not None:
            stack.callback(gateway.stop)  # before the server, so that its open requests can finish
        server.start()
        assert server.log_file is not None
        stack.enter_context(echo_file(server.log_file))
        server.wait_ready(timeout, stop.check)
        end = partial(server.stop, stop.check_again)
        if gateway is not None:
            gateway.start(server.grpc_address, stop.check)
            page = f" and a page for browsers at {gateway.page_url}" if gateway.page_url else ""
            typer.echo(f"ready: OpenAI's API at {gateway.url}{page}")
        typer.echo(
            f"ready: HTTP {server.http_address}, gRPC {server.grpc_address}, "
            f"metrics http://{server.metrics_address}/metrics; press Ctrl-C to stop"
        )
        run_until_death(server, stop, gateway, stub_timeout)


def run_until_death(
    server: TritonServer,
    stop: StopRequest,
    gateway: GatewayProcess | None = None,
    stub_timeout: float | None = STUB_TIMEOUT,
) -> NoReturn:
    """Wait until a server that is ready dies or hangs, then end what is left of it, so that no client waits for it.

    Raises:
        ServerDied: the server, one of its stubs or the gateway has died, or a stub hangs.
    """

    def check() -> None:
        stop.check()
        if gateway is not None:
            gateway.check()

    death = wait_for_death(server, check, stub_timeout)
    server.kill()
    raise ServerDied(death)
