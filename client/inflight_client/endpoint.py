"""Finds out which protocol a server speaks at an address, so that users can give either port."""

from __future__ import annotations

from inflight_client.connection import Connection, Protocol
from inflight_client.endpoints import split_urls
from inflight_client.errors import InflightError, ServerUnreachableError
from inflight_client.transport_grpc import GrpcTransport
from inflight_client.transport_http import HttpTransport

__all__ = ["find_endpoint", "find_endpoints"]

_IS_SECURE = {"": False, "http": False, "https": True, "grpc": False, "grpcs": True}
_PROTOCOLS: tuple[Protocol, ...] = ("http", "grpc")


def find_endpoint(url: str, timeout: float = 5.0) -> tuple[Protocol, str]:
    """Ask the server at `url` which protocol it speaks there.

    Args:
        url: `host:port` of Triton's HTTP or gRPC service, with or without a scheme.  `https` and `grpcs`
            select TLS; otherwise the scheme has no effect.
        timeout: seconds to wait for an answer by each protocol.

    Returns:
        The protocol, and the URL with the scheme that a client for this protocol expects.

    Raises:
        ValueError: `url` is not an address.
        ServerUnreachableError: no server answers there by either protocol.
    """
    reasons = []
    for protocol in _PROTOCOLS:
        found = _with_scheme(protocol, url)
        connection = Connection.build(found, protocol, {"connect_timeout": timeout})
        transport = HttpTransport(connection) if protocol == "http" else GrpcTransport(connection)
        try:
            transport.server_live()
        except ServerUnreachableError as error:
            reasons.append(error.message)
            continue
        except InflightError:
            pass  # it speaks the protocol and only refuses this call
        finally:
            transport.close()
        return protocol, found
    raise ServerUnreachableError("; ".join(reasons))


def find_endpoints(url: str, timeout: float = 5.0) -> tuple[Protocol, list[str]]:
    """As `find_endpoint`, for several addresses separated by commas: the first one that answers decides the protocol.

    Raises:
        ValueError: one of them is not an address.
        ServerUnreachableError: no server answers at any of them.
    """
    urls = [one or "" for one in split_urls(url)]
    found, reasons = None, []
    for one in urls:
        found, reason = _protocol_at(one, timeout) if found is None else (found, "")
        reasons.append(reason)
    if found is None:
        raise ServerUnreachableError("; ".join(reasons))
    return found, [_with_scheme(found, one) for one in urls]


def _protocol_at(url: str, timeout: float) -> tuple[Protocol | None, str]:
    try:
        return find_endpoint(url, timeout)[0], ""
    except ServerUnreachableError as error:
        return None, error.message


def _with_scheme(protocol: Protocol, url: str) -> str:
    scheme, _, address = url.rpartition("://")
    if scheme not in _IS_SECURE:
        raise ValueError(f"url={url!r}: the scheme must be one of {', '.join(filter(None, _IS_SECURE))}, or left out")
    return f"{protocol}{'s' * _IS_SECURE[scheme]}://{address}"
