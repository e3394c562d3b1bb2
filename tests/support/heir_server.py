"""A fork server whose further work waits until a test lets it go on.  Its forks say what they have.

`$HEIR_FOLDER` has two FIFOs: an heir writes its process id to `began`, and reads `go_on`.  A fork writes a line to its
pipe: "more" if the further work is done in it, else "plain"; and whether grammars are used.  After a byte it has been
asked for a grammar, says so, and waits for the end of its pipe.
"""

from __future__ import annotations

import argparse
import os
import socket
from multiprocessing.connection import Connection
from pathlib import Path

from inflight import fork_server
from inflight.grammars import demand


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--demand-fd", type=int)
    args = parser.parse_known_args()[0]
    if args.demand_fd is not None:
        demand.share_demand(args.demand_fd)
    folder, more = Path(os.environ["HEIR_FOLDER"]), list[str]()
    fork_server._ASK_SECONDS = 0.01, 0.01

    def do_more() -> None:
        (folder / "began").write_text(f"{os.getpid()}\n")
        (folder / "go_on").read_text()
        more.append("more")

    with socket.socket(fileno=args.fd) as control:
        with Connection(os.dup(args.fd)) as connection:
            connection.recv_bytes()
        forked = fork_server.serve_forks(
            control,
            lambda: None,
            lambda: False,
            lambda: not more and demand.are_grammars_used(),
            do_more,
        )
    if forked is None:
        return
    pipe = forked[0]
    os.write(pipe, f"{more[0] if more else 'plain'} {demand.are_grammars_used()}\n".encode())
    if os.read(pipe, 1):
        demand.use_grammars()
        os.write(pipe, b"asked\n")
        os.read(pipe, 1)


if __name__ == "__main__":
    main()
