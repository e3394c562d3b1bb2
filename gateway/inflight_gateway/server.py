"""Runs a gateway: uvicorn, with one process per worker."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette

from inflight_gateway.app import build_app
from inflight_gateway.connections import IDLE_SECONDS, ClientConnection
from inflight_gateway.hosts import LOCAL, is_loopback
from inflight_gateway.metrics import SHARED_FOLDER
from inflight_gateway.options import GatewayOptions

__all__ = ["ServerOptions", "end_with_parent", "run", "with_default_hosts", "worker_app"]

# Passes the options to worker processes, which import their application by name.
_OPTIONS, _PARENT = "INFLIGHT_GATEWAY_OPTIONS", "INFLIGHT_GATEWAY_PARENT"
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Where and how the gateway listens.

    Attributes:
        host, port: the address.
        workers: processes; each uses at most one core.
        ssl_keyfile, ssl_certfile: PEM files; both or none.
        exit_timeout: seconds for open requests to finish after SIGTERM.
        log_level: uvicorn's: "critical", "error", "warning", "info", "debug" or "trace".
        access_log: log a line for each request.
    """

    host: str = "127.0.0.1"
    port: int = 9000
    workers: int = 1
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    exit_timeout: int = 10
    log_level: str = "warning"
    access_log: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers={self.workers}: must be at least 1")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("TLS takes both a key and a certificate")
        for path in (self.ssl_keyfile, self.ssl_certfile):
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{path}: no such file")


def run(options: GatewayOptions, server: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM.  Exits with a status above 0 if the port cannot be used."""
    options = with_default_hosts(options, server.host)
    if server.workers == 1:
        uvicorn.run(build_app(options), **_uvicorn_options(server))
        return
    os.environ[_OPTIONS] = msgspec.json.encode(options).decode()
    os.environ[_PARENT] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="inflight-gateway-") as folder:
        os.environ[SHARED_FOLDER] = folder
        name = f"{__name__}:worker_app"
        uvicorn.run(name, factory=True, workers=server.workers, **_uvicorn_options(server))


def with_default_hosts(options: GatewayOptions, host: str) -> GatewayOptions:
    """The options of a gateway that listens on `host`: without keys, a page must not reach one that is only local."""
    if options.allowed_hosts or options.api_keys or not is_loopback(host):
        return options
    return dataclasses.replace(options, allowed_hosts=LOCAL)


def worker_app() -> Starlette:
    """The application of a worker process, which ends with its parent."""
    parent = int(os.environ[_PARENT])
    end_with_parent(parent)

    def clean_up() -> None:
        if os.getppid() != parent:  # it was killed, and could not end this process itself
            shutil.rmtree(os.environ[SHARED_FOLDER], ignore_errors=True)

    return build_app(msgspec.json.decode(os.environ[_OPTIONS], type=GatewayOptions), on_stop=clean_up)


def end_with_parent(pid: int) -> None:
    """Let the kernel end this process when the thread of its parent that started it ends.

    Raises:
        SystemExit: the parent has ended already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != pid:
        raise SystemExit("the gateway's parent process has ended")


def _uvicorn_options(server: ServerOptions) -> dict[str, Any]:
    return {
        "host": server.host,
        "port": server.port,
        "http": ClientConnection,
        "ws": "none",
        "ssl_keyfile": server.ssl_keyfile,
        "ssl_certfile": server.ssl_certfile,
        "log_level": server.log_level,
        "access_log": server.access_log,
        "server_header": False,
        "timeout_graceful_shutdown": server.exit_timeout,
        "timeout_keep_alive": IDLE_SECONDS,
    }
