"""Inflight behind a real tritonserver on 127.0.0.1, which streams over gRPC to a client in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import job
from run_inflight import options

sys.path.insert(0, str(Path(__file__).parent.parent))
import serving


def main() -> None:
    task = job.read()
    with serving.served(options(task)) as server:

        def generate(address: str, requests: list[dict[str, Any]]) -> list[list[int]]:
            return [answer.token_ids for answer in serving.stream_all(address, requests)]

        packages = ["inflight", "torch", "transformers", "tritonclient"]
        job.run(packages, lambda _: server.grpc_address, generate)


if __name__ == "__main__":
    main()
