"""Which names the header `Host` can have.

A foreign page can let its own name point to this machine (DNS rebinding); its requests are then of the same origin, so
no browser asks before it sends them.  They have the page's name in `Host`, which IP addresses and local names never
equal.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from inflight_gateway.errors import APIError

__all__ = ["LOCAL", "AllowedHosts", "check_allowed_hosts", "is_loopback"]

LOCAL = ("localhost",)  # as `allowed_hosts`: only names of this machine

_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_LOCAL_ENDS = (".localhost", ".local", ".internal")  # no public name ends so (RFC 6761, RFC 6762, ICANN)
_MAX_SHOWN = 100


def check_allowed_hosts(names: Collection[str]) -> None:
    """Check the operator's choice: names, `*.example.com` for all below one, or "*" for any.

    Raises:
        ValueError: anything else, such as a name with a port.
    """
    for name in names:
        if name != "*" and not _NAME.fullmatch(name.lower()):
            raise ValueError(f"allowed_hosts {name!r}: must be a name such as llm.example.com, *.example.com, or *")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class AllowedHosts:
    """Checks the header.

    Args:
        names: see `check_allowed_hosts`; IP addresses and local names are always allowed.  Empty: any.
    """

    def __init__(self, names: Collection[str]) -> None:
        lowered = {name.lower() for name in names}
        self._any = not lowered or "*" in lowered
        self._names = lowered | {"", "localhost", socket.gethostname().lower()}
        self._ends = (*(name[1:] for name in lowered if name.startswith("*.")), *_LOCAL_ENDS)

    def check(self, header: str) -> None:
        """Raise APIError (403) if the header is not allowed."""
        if self._any:
            return
        name = _name(header)
        if name in self._names or name.endswith(self._ends) or _is_address(name):
            return
        raise APIError(
            403,
            f"the host {header[:_MAX_SHOWN]!r} is none of this gateway's names; start it with --allowed-hosts for that "
            "name, or call it by an IP address",
            code="host_not_allowed",
        )


def _name(header: str) -> str:
    """The header without its port, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
