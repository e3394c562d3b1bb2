"""A stub closes the server's sockets, and no other descriptor."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

CHECK = textwrap.dedent(
    """
    import os, sys
    from inflight.frontend.lifecycle import inherited_sockets

    def is_open(fd):
        try:
            os.fstat(fd)
        except OSError:
            return False
        return True

    if "stub" in sys.argv[1]:
        inherited_sockets._STUB = os.path.basename(os.readlink("/proc/self/exe"))
    inherited_sockets.close_inherited_sockets()
    print(*(is_open(int(fd)) for fd in sys.argv[2:]))
    """
)


def left(process: str, *fds: int, **options: int) -> list[bool]:
    """Which of the descriptors a process has after the call that it was started with."""
    command = [sys.executable, "-c", CHECK, process, *map(str, fds)]
    done = subprocess.run(command, pass_fds=[fd for fd in fds if fd > 2], stdout=subprocess.PIPE, check=True, **options)
    return [word == b"True" for word in done.stdout.split()]


def test_sockets_without_a_name_and_those_of_the_network_are_closed(tmp_path: Path) -> None:
    pair = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as log:
        log.bind(str(tmp_path / "log"))
        log.listen()
        with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as idle, pair[0], pair[1]:
            named.connect(str(tmp_path / "log"))
            reads, writes = os.pipe()
            fds = [server.fileno(), pair[0].fileno(), pair[1].fileno(), named.fileno(), idle.fileno(), reads, writes]
            assert left("stub", *fds) == [False, False, False, True, True, True, True]
            assert left("another", *fds) == [True] * 7
            assert left("stub", 0, stdin=pair[0].fileno()) == [True], "a standard stream"
            os.close(reads)
            os.close(writes)
