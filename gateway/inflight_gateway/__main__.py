"""`python -m inflight_gateway`: a gateway as a child process, with its options as JSON on stdin.

Command lines and environments show up in lists of processes; API keys must not.
"""

from __future__ import annotations

import sys

import msgspec

from inflight_gateway.options import GatewayOptions
from inflight_gateway.server import ServerOptions, end_with_parent, run

__all__ = ["Start"]


class Start(msgspec.Struct):
    """The JSON on stdin.  `parent`: this process ends with the process of that id."""

    options: GatewayOptions
    server: ServerOptions
    parent: int


if __name__ == "__main__":
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=Start)
    end_with_parent(start.parent)
    run(start.options, start.server)
