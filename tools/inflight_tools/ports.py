"""TCP ports for a server: finds free ones, and explains in one line why a port cannot be used."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Mapping

from inflight_tools.installation import LauncherError

__all__ = ["check_port", "pick_ports", "resolve_ports"]

# Below the ports that Linux gives to outgoing connections: one of these would take a port before its server listens.
_OURS = range(20_000, 30_000)
_TRIES = 20


def pick_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` distinct TCP ports of `host` that are free now.

    Raises:
        LauncherError: `host` is not an address of this machine.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(_family(host))) for _ in range(count)]
        try:
            for sock in sockets:
                _bind(sock, host)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise LauncherError(f"cannot listen on host {host!r}: {reason}; change --host") from None
        return [sock.getsockname()[1] for sock in sockets]


def resolve_ports(requested: Mapping[str, int | None], host: str) -> dict[str, int]:
    """Port of each service: the requested one, or a free one where 0 is requested; None leaves the service out.

    Raises:
        LauncherError: a port is out of range, in use, requested twice or not permitted, or `host` is
            not an address of this machine.
    """
    wanted = {service: port for service, port in requested.items() if port is not None}
    pick_ports(1, host)  # otherwise a wrong host would be blamed on a port
    fixed = [port for port in wanted.values() if port]
    for service, port in wanted.items():
        option = f"--{service.lower()}-port"
        if port and fixed.count(port) > 1:
            raise LauncherError(f"port {port} is given to more than one service; change {option}")
        if port:
            check_port(host, port, service, option)
    picked = pick_ports(len(wanted), host)  # one of them can be a requested port, which is free, too
    free = iter([port for port in picked if port not in fixed])
    return {service: port or next(free) for service, port in wanted.items()}


def check_port(host: str, port: int, service: str, option: str) -> None:
    """Raise LauncherError if nothing can listen there; `service` and `option` are for the message."""
    if not 0 < port < 2**16:
        raise LauncherError(f"port {port} ({service}) must be between 0 and 65535; change {option}")
    with socket.socket(_family(host)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except PermissionError:
            raise LauncherError(f"no permission to listen on port {port} ({service}); change {option}") from None
        except OSError as error:
            raise LauncherError(
                f"port {port} ({service}) on {host}: {error.strerror}; change {option} (0 picks a free port)"
            ) from None


def _bind(sock: socket.socket, host: str) -> None:
    """Bind to a free port, chosen at random: two programs that look for one at the same time find different ones."""
    for port in random.SystemRandom().sample(_OURS, _TRIES):
        with contextlib.suppress(OSError):  # taken; what else is wrong, the last try tells
            return sock.bind((host, port))
    sock.bind((host, 0))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
