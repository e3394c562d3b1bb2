"""Closes the server's sockets in a stub that was started after them.  No torch, no Triton."""

from __future__ import annotations

import contextlib
import os
import socket

__all__ = ["close_inherited_sockets"]

_STUB = "triton_python_backend_stub"
_STANDARD = 3  # the first descriptors, which can be sockets of a service manager


def close_inherited_sockets() -> None:
    """Close the sockets of this process, if it is a stub of Triton; call it before the stub opens one itself.

    tritonserver 24.10 forks its stubs with every socket that it has open: connections of clients, and two for each of
    its HTTP threads.  A stub that kept them would keep a connection open that the server has closed, and a port in use
    after the server's death.  UNIX sockets with a name stay: they can be those of a log.
    """
    if os.path.basename(os.readlink("/proc/self/exe")) != _STUB:
        return
    for name in os.listdir("/proc/self/fd"):
        if int(name) < _STANDARD:
            continue
        with contextlib.suppress(OSError):  # not a socket, or closed: the one that lists the folder
            found = socket.socket(fileno=int(name))
            if _is_of_the_server(found):
                found.close()
            else:
                found.detach()


def _is_of_the_server(found: socket.socket) -> bool:
    if found.family == socket.AF_UNIX:
        with contextlib.suppress(OSError):
            return not (found.getsockname() or found.getpeername())
    return found.family in (socket.AF_INET, socket.AF_INET6)
