#!/usr/bin/env python3
"""A gRPC server that answers a gateway with what a real tritonserver sent, and never ends a stream.

python bench/replaying_triton.py RECORD PORT     RECORD: the JSON file that gateway.py writes
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop
from tritonclient.grpc import service_pb2 as pb


class Replay(grpc.GenericRpcHandler):
    """Args: the record."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._metadata = bytes.fromhex(record["metadata"])
        self._model = list(map(bytes.fromhex, record["model"]))
        # Without the last two, which end the stream.
        self._first, *self._rest, _, _ = map(bytes.fromhex, record["chunks"])
        self._name = pb.ModelMetadataResponse.FromString(self._metadata).name
        self._answers = {
            "ModelMetadata": self._metadata,
            "RepositoryIndex": pb.RepositoryIndexResponse(
                models=[pb.RepositoryIndexResponse.ModelIndex(name=self._name, version="1", state="READY")]
            ).SerializeToString(),
            "ModelReady": pb.ModelReadyResponse(ready=True).SerializeToString(),
            "ServerReady": pb.ServerReadyResponse(ready=True).SerializeToString(),
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = details.method.rpartition("/")[2]
        if method == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream, pb.ModelInferRequest.FromString)
        if method in self._answers:
            return grpc.unary_unary_rpc_method_handler(self._answer(self._answers[method]))
        return None

    @staticmethod
    def _answer(answer: bytes) -> Any:
        async def unary(request: bytes, context: Any) -> bytes:
            return answer

        return unary

    async def _stream(self, requests: AsyncIterator[pb.ModelInferRequest], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            if "control" in request.parameters:
                for chunk in self._model:
                    yield chunk
                return
            yield self._first
            for chunk in itertools.cycle(self._rest):
                yield chunk


async def main() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Replay(json.loads(Path(sys.argv[1]).read_text())),))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[2]}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main())
