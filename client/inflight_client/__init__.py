"""Client for Inflight: streaming text generation over gRPC or HTTP, blocking or asyncio.

from inflight_client import Client

with Client("127.0.0.1:8001", model="demo") as client:
    for chunk in client.stream("Return the number of", max_tokens=40):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

from inflight_client.client import AsyncClient, Client
from inflight_client.endpoints import Routing
from inflight_client.errors import (
    DeadlineExceededError,
    InflightError,
    InvalidRequestError,
    RequestCancelledError,
    ServerError,
    ServerUnreachableError,
    UnavailableError,
)
from inflight_client.pooling import Classes, Embeddings, RankedDocument, Scores
from inflight_client.results import (
    Choice,
    ChoiceDelta,
    GenerationResult,
    Logprob,
    StreamChunk,
    Timings,
    Usage,
)
from inflight_client.retry import RetryPolicy
from inflight_client.stream import AsyncStream, Stream
from inflight_client.tools import tool_calls

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "ChoiceDelta",
    "Classes",
    "Client",
    "DeadlineExceededError",
    "Embeddings",
    "GenerationResult",
    "InflightError",
    "InvalidRequestError",
    "Logprob",
    "RankedDocument",
    "RequestCancelledError",
    "RetryPolicy",
    "Routing",
    "Scores",
    "ServerError",
    "ServerUnreachableError",
    "Stream",
    "StreamChunk",
    "Timings",
    "UnavailableError",
    "Usage",
    "tool_calls",
]
