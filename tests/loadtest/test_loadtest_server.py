"""The addresses of a server that is running already."""

from __future__ import annotations

import pytest

from loadtest import server
from loadtest.errors import LoadTestError
from loadtest.server import Endpoints


@pytest.mark.parametrize(
    ("found", "http", "grpc", "metrics"),
    [
        (("http", "http://gpu:8000"), "gpu:8000", "gpu:8001", "gpu:8002"),
        (("grpc", "grpc://gpu:9001"), "gpu:9000", "gpu:9001", "gpu:9002"),
        (("http", "http://[::1]:80"), "[::1]:80", "[::1]:81", "[::1]:82"),
    ],
)
def test_one_address_implies_the_others(
    monkeypatch: pytest.MonkeyPatch, found: tuple[str, str], http: str, grpc: str, metrics: str
) -> None:
    monkeypatch.setattr(server, "find_endpoint", lambda url: found)
    endpoints, protocol = Endpoints.at("any")
    assert (endpoints.http, endpoints.grpc, endpoints.metrics, endpoints.pid) == (http, grpc, metrics, None)
    assert protocol == found[0]


def test_an_address_without_a_port_implies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_endpoint", lambda url: ("http", "https://proxy"))
    with pytest.raises(LoadTestError, match="url='https://proxy': expected host:port"):
        Endpoints.at("https://proxy")
