"""How the gateway's HTTP server is set up."""

from __future__ import annotations

from inflight_gateway.server import ServerOptions, _uvicorn_options


def test_an_idle_connection_outlives_those_in_the_pools_of_clients_and_proxies() -> None:
    """httpx keeps one for 5 s, nginx and AWS's load balancers for 60 s."""
    assert _uvicorn_options(ServerOptions())["timeout_keep_alive"] > 60
