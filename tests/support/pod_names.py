"""A gRPC client with a pod's name server, search list and hosts file, in namespaces of its own (`unshare`).

`python pod_names.py FOLDER round-robin|ordered` prints the pods that answered, as JSON.  Pods are addresses of the
loopback interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc.aio

from inflight_client.connection import Connection

HOST, SUFFIX = "v1.llm-triton", "default.svc.cluster.local"
PORT, OWN = 8001, 9  # the pod in which the client runs
FILES = {
    "resolv.conf": f"nameserver 127.0.0.1\nsearch {SUFFIX} svc.cluster.local cluster.local\noptions ndots:5\n",
    # As the kubelet writes it for a pod with `hostname` and `subdomain`.
    "hosts": f"127.0.0.1 localhost\n127.0.0.{OWN} {HOST}.{SUFFIX} v1\n",
}
_A = 1  # the type of a question for IPv4 addresses


class Cluster:
    """Pods, and the name server that knows which are behind the name.

    Attributes:
        named: pods that the name has.
        answered: number of calls that each pod has answered.
    """

    def __init__(self) -> None:
        self.named: list[int] = []
        self.answered: dict[int, int] = {}
        self._servers: dict[int, Any] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        threading.Thread(target=self._answer_names, daemon=True).start()

    def _answer_names(self) -> None:
        while True:
            question, sender = self._socket.recvfrom(4096)
            end, labels = 12, []
            while size := question[end]:
                labels.append(question[end + 1 : end + 1 + size].decode())
                end += size + 1
            known = ".".join(labels) == f"{HOST}.{SUFFIX}"
            (kind,) = struct.unpack("!H", question[end + 1 : end + 3])
            pods = self.named if known and kind == _A else []
            records = [b"\xc0\x0c" + struct.pack("!HHIH4B", _A, 1, 5, 4, 127, 0, 0, pod) for pod in pods]
            head = struct.pack("!HHHHH", 0x8180 if known else 0x8183, 1, len(records), 0, 0)
            self._socket.sendto(question[:2] + head + question[12 : end + 5] + b"".join(records), sender)

    async def start(self, pod: int) -> None:
        async def answer(request: bytes, context: Any) -> bytes:
            self.answered[pod] = self.answered.get(pod, 0) + 1
            return b""

        handlers = {"Ask": grpc.unary_unary_rpc_method_handler(answer)}
        self._servers[pod] = server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inflight.Test", handlers),))
        server.add_insecure_port(f"127.0.0.{pod}:{PORT}")
        await server.start()

    async def stop(self, *pods: int) -> None:
        for pod in pods:
            await self._servers.pop(pod).stop(0)


async def rollout(round_robin: bool) -> list[list[int]]:
    """The pods that answer while two old ones serve, and once a new one has replaced them."""
    cluster = Cluster()
    for pod in (OWN, 2, 3):
        await cluster.start(pod)
    target = f"{HOST}:{PORT}"
    arguments = Connection.build(target, "grpc", {"round_robin": round_robin}).grpc_client_options()["channel_args"]
    async with grpc.aio.insecure_channel(target, arguments) as channel:
        ask = channel.unary_unary("/inflight.Test/Ask")
        cluster.named = [2, 3]
        while sum(cluster.answered.values()) < 20 or (round_robin and len(cluster.answered) < 2):
            await ask(b"", wait_for_ready=True)
        before = sorted(cluster.answered)
        await cluster.start(4)
        cluster.named = [4]
        await cluster.stop(2, 3)
        cluster.answered.clear()
        while not cluster.answered:
            with contextlib.suppress(grpc.RpcError):  # the client library waits and tries again
                await ask(b"")
            await asyncio.sleep(0.1)
    found = [before, sorted(cluster.answered)]
    await cluster.stop(OWN, 4)
    return found


if __name__ == "__main__":
    for name, text in FILES.items():
        file = Path(sys.argv[1]) / name
        file.write_text(text)
        subprocess.run(["mount", "--bind", file, Path("/etc") / name], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print(json.dumps(asyncio.run(rollout(sys.argv[2] == "round-robin"))))
