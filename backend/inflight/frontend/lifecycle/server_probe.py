"""Asks the server of this stub, over HTTP like any client, whether a model is ready.

Triton does not tell a stub that its model is being unloaded or that the server stops, and `pb_utils.is_model_ready` is
not usable: once Triton 24.10 has begun to stop, the call can leave the stub's other messages hanging (2 of 12
times).  The address is found among the sockets that the server listens on.  Linux only, like Triton.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import struct
from pathlib import Path
from urllib.parse import quote

__all__ = ["ServerProbe", "listening_addresses"]

_LISTEN = "0A"  # the state in /proc/net/tcp
_SECONDS = 2.0
_NOT_FOR_US = (401, 403)  # --http-restricted-api


class ServerProbe:
    """Asks about one model version.

    Args:
        server: process id of the server.
    """

    def __init__(self, model: str, version: str, server: int) -> None:
        self._path = f"/v2/models/{quote(model, safe='')}/versions/{quote(version, safe='')}/ready"
        self._server = server
        self._address: tuple[str, int] | None = None

    def is_ready(self) -> bool | None:
        """Whether the server accepts requests for the model.

        None if that is unknown: no HTTP service, a timeout, or an endpoint that is restricted.
        """
        if self._address is None:
            self._address = self._find()
        if self._address is None:
            return None
        try:
            status = _status(self._address, self._path)
            return None if status in _NOT_FOR_US else status == 200
        except ConnectionError:  # a stopping server first refuses or resets connections
            return False
        except (OSError, http.client.HTTPException):
            return None

    def _find(self) -> tuple[str, int] | None:
        """The address of its HTTP service."""
        for address in listening_addresses(self._server):
            with contextlib.suppress(OSError, http.client.HTTPException):
                # The metrics service answers 200 to every path.
                if _status(address, "/v2/health/live") == 200 != _status(address, "/v2/health/no-such-path"):
                    return address
        return None


def _status(address: tuple[str, int], path: str) -> int:
    connection = http.client.HTTPConnection(*address, timeout=_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def listening_addresses(pid: int) -> list[tuple[str, int]]:
    """TCP addresses of a process's listening sockets, as this machine can reach them."""
    inodes = set()
    with contextlib.suppress(OSError):  # another user's
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in inodes:
                    found.append(_address(fields[1], family))
    return found


def _address(text: str, family: socket.AddressFamily) -> tuple[str, int]:
    """Decode the kernel's form: 32-bit words in the machine's byte order, and the port."""
    words, port = text.split(":")
    packed = b"".join(struct.pack("=I", int(words[k : k + 8], 16)) for k in range(0, len(words), 8))
    host = socket.inet_ntop(family, packed)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port, 16)
