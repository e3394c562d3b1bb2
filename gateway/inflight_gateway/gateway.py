"""The common state of all requests of a gateway process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.requests import Request

from inflight_gateway.body_reader import BodyReader
from inflight_gateway.errors import APIError
from inflight_gateway.handover import with_handover
from inflight_gateway.metrics import Metrics
from inflight_gateway.model_upstreams import upstream_for
from inflight_gateway.options import GatewayOptions
from inflight_gateway.replicas import Replicas
from inflight_gateway.tracing import close_provider, make_provider
from inflight_gateway.triton_metrics import TritonMetrics
from inflight_gateway.upstream import AnyUpstream

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["Gateway", "gateway_of"]

_log = logging.getLogger("inflight_gateway")


class Gateway:
    """Options, upstream, metrics and bodies of one process.

    Args:
        options: of the operator.
        upstream, replicas, provider: replace real ones, in tests.

    Attributes:
        beginning: the generations whose first chunk has come, and whose answer has not begun.
    """

    def __init__(
        self,
        options: GatewayOptions,
        upstream: AnyUpstream | None = None,
        replicas: Replicas | None = None,
        provider: TracerProvider | None = None,
    ) -> None:
        self.options = options
        self.metrics = Metrics()
        self.beginning: set[object] = set()
        self.bodies = BodyReader(options)
        self.upstream = upstream or with_handover(
            options,
            upstream_for(options, self.metrics.routed),
            self.metrics.handed_over,
            self.metrics.continued_after,
        )
        self.replicas = replicas or Replicas(options, self.upstream)
        self.triton_metrics = TritonMetrics(options.triton_metrics) if options.triton_metrics else None
        self.provider = provider
        if provider is None and options.otlp_traces_endpoint:
            self.provider = make_provider(options.otlp_traces_endpoint)

    async def close(self) -> None:
        """Cancel open requests and close the connections."""
        await self.upstream.close()
        await self.replicas.close()
        if self.triton_metrics is not None:
            await self.triton_metrics.close()
        if self.provider is not None:
            await close_provider(self.provider)

    def enter(self) -> None:
        """A request starts to generate.

        Raises:
            APIError: 429, there are too many.
        """
        if self.metrics.open_requests >= self.options.max_open_requests:
            raise APIError(
                429,
                f"{self.metrics.open_requests} requests are open, as many as this gateway takes; try again later",
                code="too_many_requests",
                retry_after=1.0,
            )
        self.metrics.opened()

    def leave(self) -> None:
        """A request that entered has ended."""
        self.metrics.closed()

    def tenant(self, http: Request, user: str | None) -> str | None:
        """The tenant of a request: the tenant header, else the body's `user`."""
        name = self.options.tenant_header
        return (http.headers.get(name) if name else None) or user or None

    def log_failure(self, error: Exception, shown: APIError) -> None:
        """Log an unexpected exception; the caller does not get its details."""
        if shown.code == "internal_error" and error is not shown:
            _log.error("a request failed", exc_info=error)


def gateway_of(http: Request) -> Gateway:
    """The gateway that received a request."""
    gateway: Gateway = http.app.state.gateway
    return gateway
