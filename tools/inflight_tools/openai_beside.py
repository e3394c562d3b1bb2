"""OpenAI's API beside `inflight serve`: on loopback unless the options say otherwise, and in no server's way."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from inflight_tools import admin
from inflight_tools.gateway import gateway_options
from inflight_tools.installation import LauncherError
from inflight_tools.ports import check_port, resolve_ports
from inflight_tools.terminal import fail

if TYPE_CHECKING:
    from inflight_tools.gateway_process import GatewayProcess

__all__ = ["OpenAIAddress", "gateway_beside"]

_HOST, _PORT = "127.0.0.1", 9000
_NEEDED = "uvicorn"  # what only the extra `gateway` installs


@dataclass(frozen=True)
class OpenAIAddress:
    """The address, by the options of the command line.

    Attributes:
        port: None: the default one, which may be busy; 0: a free one.
        host: None: the server's if the port is given, else loopback.
        workers: processes.
        ssl_keyfile, ssl_certfile: for HTTPS.
        server_host: where Triton listens.
        server_ports: of Triton's services.
    """

    port: int | None
    host: str | None
    workers: int
    ssl_keyfile: Path | None
    ssl_certfile: Path | None
    server_host: str
    server_ports: Collection[int]

    @property
    def is_asked_for(self) -> bool:
        """Whether the server must not start without it."""
        return any(given is not None for given in (self.port, self.host, self.ssl_keyfile, self.ssl_certfile))


def gateway_beside(admin_key: str | None, address: OpenAIAddress, **values: Any) -> GatewayProcess | None:
    """A gateway, not started; None, with a line that says why, if it was not asked for and cannot listen.

    Args:
        admin_key: the server's.
        values: of `GatewayOptions`.

    Raises:
        LauncherError: its address cannot be used.
    """
    if not address.is_asked_for and importlib.util.find_spec(_NEEDED) is None:
        typer.echo("without OpenAI's API, which needs: pip install 'triton-inflight[gateway]'", err=True)
        return None
    options = gateway_options(headers=admin.grpc_metadata(admin_key), admin_key=admin_key or "", **values)
    host = address.host or (_HOST if address.port is None else address.server_host)
    try:
        port = _free_port(host, _PORT if address.port is None else address.port, address.server_ports)
    except LauncherError as error:
        if address.is_asked_for:
            raise
        typer.echo(f"without OpenAI's API: {error}", err=True)
        return None
    from inflight_gateway.server import ServerOptions
    from inflight_tools.gateway_process import GatewayProcess

    key, certificate = (None if file is None else str(file) for file in (address.ssl_keyfile, address.ssl_certfile))
    try:
        server = ServerOptions(host, port, address.workers, ssl_keyfile=key, ssl_certfile=certificate)
    except ValueError as error:
        fail(str(error), status=2)
    return GatewayProcess(options, server)


def _free_port(host: str, port: int, taken: Collection[int]) -> int:
    if port and port in taken:
        raise LauncherError(f"port {port} is given to more than one service; change --openai-port")
    chosen = resolve_ports({"OpenAI": port}, host)["OpenAI"]
    check_port(host, chosen, "OpenAI", "--openai-port")
    return chosen
