"""Triton's own `/metrics`, for endpoint pickers that read a replica's load on the gateway's port."""

from __future__ import annotations

import httpx2

from inflight_gateway.errors import APIError

__all__ = ["TritonMetrics"]

_SECONDS = 2.0  # for an answer


class TritonMetrics:
    """Reads Triton's metrics over one connection: endpoint pickers ask many times a second.

    Args:
        url: such as "http://127.0.0.1:8002/metrics".
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # Reading CA certificates takes tens of milliseconds, and plain HTTP does not need them.
        self._http = httpx2.AsyncClient(timeout=_SECONDS, trust_env=False, verify=url.startswith("https://"))

    async def text(self) -> bytes:
        """In Prometheus' text format.

        Raises:
            APIError: 503, they cannot be read.
        """
        try:
            answer = await self._http.get(self._url)
            answer.raise_for_status()
        except httpx2.HTTPError as error:
            message = f"Triton's metrics at {self._url} cannot be read: {error}"
            raise APIError(503, message, code="upstream_unreachable") from None
        return answer.content

    async def close(self) -> None:
        await self._http.aclose()
