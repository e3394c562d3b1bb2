"""Inflight behind a real tritonserver on 127.0.0.1, which streams over gRPC to a client in this process."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import job
from run_inflight import options

if TYPE_CHECKING:
    from inflight_tools.launcher import TritonServer

sys.path.insert(0, str(Path(__file__).parent.parent))


def load(task: dict[str, Any]) -> TritonServer:
    from inflight_tools.launcher import TritonServer

    version = Path(task["folder"]) / "bench" / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps(options(task)))
    (version.parent / "config.pbtxt").write_text('backend: "inflight"\n')
    server = TritonServer(task["folder"])
    server.start()
    server.wait_ready()
    return server


def generate(server: TritonServer, requests: list[dict[str, Any]]) -> int:
    from overhead import stream_all

    tokens, _ = stream_all(server.grpc_address, requests)
    return tokens


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        task = {**job.read(), "folder": folder}
        job.run(["inflight", "torch", "transformers", "tritonclient"], lambda _: load(task), generate, stop)


def stop(server: TritonServer) -> dict[str, Any]:
    server.stop()
    return {}


if __name__ == "__main__":
    main()
