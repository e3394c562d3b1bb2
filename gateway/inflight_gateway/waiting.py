"""Requests that wait until their model is known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from inflight_gateway.errors import APIError

__all__ = ["WaitingRequests"]


class WaitingRequests:
    """The requests to the same Tritons that have not said yet whether they have the model; each holds its body.

    Args:
        limit: maximum number.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count a request while it waits.

        Raises:
            APIError: 503, there are too many; another gateway may reach Triton.
        """
        if self.count >= self._limit:
            raise APIError(
                503,
                f"{self.count} requests wait for Triton to answer about their model, as many as may "
                f"(max_open_requests={self._limit}); try again later",
                code="upstream_unreachable",
                retry_after=1.0,
            )
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
