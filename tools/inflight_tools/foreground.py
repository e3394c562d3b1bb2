"""Runs a server in the foreground of a terminal until it is stopped or dies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import typer

from inflight.frontend.lifecycle.stub_beat import STUB_TIMEOUT
from inflight_client.local_servers import announced
from inflight_tools.installation import LauncherError, ServerDied
from inflight_tools.server_output import ServerOutput
from inflight_tools.terminal import StopRequest, one_line_errors, stop_signals
from inflight_tools.watch import wait_for_death

if TYPE_CHECKING:
    from inflight_tools.gateway_process import GatewayProcess
    from inflight_tools.launcher import TritonServer

__all__ = ["print_key", "run_in_foreground", "run_until_death", "started"]


def run_in_foreground(
    server: TritonServer,
    timeout: float,
    gateway: GatewayProcess | None = None,
    stub_timeout: float | None = STUB_TIMEOUT,
    output: ServerOutput | None = None,
    made_key: str | None = None,
) -> None:
    """Run `server` until it is stopped or dies.

    Returns on a stop signal.  Exits with status 1 if the server cannot be started, and with 3 if it was ready and
    died.

    Args:
        server: not started.
        timeout: seconds that models can take to load.
        gateway: to be started once the server is ready; it ends with the server.
        stub_timeout: see `wait_for_death`.
        output: shows the server's log.
        made_key: the server's admin key if it was not chosen; it is printed once the server is ready.
    """
    with (
        stop_signals() as stop,
        one_line_errors(),
        started(server, timeout, stop, output) as check,
        contextlib.ExitStack() as stack,
    ):
        ready = (
            f"ready: HTTP {server.http_address}, gRPC {server.grpc_address}, "
            f"metrics http://{server.metrics_address}/metrics; press Ctrl-C to stop"
        )
        if gateway is not None:
            stack.callback(gateway.stop)  # before the server, so that its open requests can finish
            gateway.start(server.grpc_address, check)
            page = f" and a page for browsers at {gateway.page_url}" if gateway.page_url else ""
            ready = f"ready: OpenAI's API at {gateway.url}{page}\n{ready}"
        print_key(made_key)
        typer.echo(ready)
        run_until_death(server, check, gateway, stub_timeout)


def print_key(made_key: str | None) -> None:
    """Print the admin key of a server that is ready; None: it was chosen, or there is none."""
    if made_key is not None:
        typer.echo(f"admin key, for model control, shared memory, statistics, trace and log settings: {made_key}")


@contextlib.contextmanager
def started(
    server: TritonServer, timeout: float, stop: StopRequest, output: ServerOutput | None = None
) -> Iterator[Callable[[], None]]:
    """Start `server`, wait until it is ready, and end it with the context; if it fails, its log is kept.

    Args:
        timeout: seconds that models can take to load.
        output: shows the server's log; None: what matters of it.

    Yields:
        To be called ten times a second: shows what comes in the log, and raises KeyboardInterrupt after a stop signal.

    Raises:
        LauncherError: it does not start, or what is raised within the context.
    """
    output = output or ServerOutput()

    def check() -> None:
        output.look()
        stop.check()

    def check_again() -> None:
        output.look()
        stop.check_again()

    end: Callable[[], None] = server.kill  # until it is ready nothing runs
    failed = False
    try:
        server.start()
        assert server.log_file is not None
        output.follow(server.log_file)
        server.wait_ready(timeout, check)
        output.ready()
        end = partial(server.stop, check_again)
        with announced(server.addresses, server.admin_key):
            yield check
    except LauncherError:
        failed = True
        raise
    finally:
        try:
            end()
        finally:
            output.finish(server.log_bytes())
            if failed:
                output.keep(server.log_bytes())


def run_until_death(
    server: TritonServer,
    look: Callable[[], None],
    gateway: GatewayProcess | None = None,
    stub_timeout: float | None = STUB_TIMEOUT,
) -> NoReturn:
    """Wait until a server that is ready dies or hangs, then end what is left of it, so that no client waits for it.

    Args:
        look: called ten times a second; an exception that it raises ends the wait.

    Raises:
        ServerDied: the server, one of its stubs or the gateway has died, or a stub hangs.
    """

    def check() -> None:
        look()
        if gateway is not None:
            gateway.check()

    death = wait_for_death(server, check, stub_timeout)
    server.kill()
    raise ServerDied(death)
