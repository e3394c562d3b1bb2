"""How to connect to a server: address, headers, TLS."""

from __future__ import annotations

import ipaddress
import ssl as ssl_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict
from urllib.parse import urlsplit

__all__ = ["Connection", "ConnectionOptions", "Protocol"]

Protocol = Literal["grpc", "http"]

_DEFAULT_URLS: dict[str, str] = {"grpc": "127.0.0.1:8001", "http": "127.0.0.1:8000"}
# URL schemes before host:port, and whether they mean TLS.
_SCHEMES: dict[str, dict[str, bool]] = {
    "grpc": {"grpc": False, "grpcs": True},
    "http": {"http": False, "https": True},
}
_INT32_MAX = 2**31 - 1


class ConnectionOptions(TypedDict, total=False):
    """Keyword arguments of both clients, named as in `tritonclient`.

    For both protocols:
        headers: sent with every call (gRPC metadata or HTTP headers).
        ssl: use TLS; implied by `https://`, `grpcs://`, `creds` and `ssl_context`.
        root_certificates: PEM file of authorities to trust instead of the system's.
        private_key, certificate_chain: PEM files of the client certificate.
        connect_timeout: seconds for health and metadata calls, and to establish an HTTP connection.
    For gRPC only:
        creds: `grpc.ChannelCredentials` instead of the three files.
        keepalive_options: `tritonclient.grpc.KeepAliveOptions`.
        round_robin: if the server's name has several addresses, send requests to them in turn; otherwise the first that
            accepts a connection gets all.
        channel_args: all channel arguments; this client then sets none of its own.
    For HTTP only:
        ssl_context: `ssl.SSLContext` instead of the three files.
    """

    headers: Mapping[str, str]
    ssl: bool
    root_certificates: str
    private_key: str
    certificate_chain: str
    connect_timeout: float
    creds: Any
    keepalive_options: Any
    round_robin: bool
    channel_args: Sequence[tuple[str, Any]]
    ssl_context: ssl_module.SSLContext


def _check_http_address(url: str | None, address: str) -> None:
    """Raise ValueError unless it is `host[:port][/path]`.  gRPC accepts more forms and reports errors itself."""
    try:
        parts = urlsplit(f"//{address}")
        wrong = None if parts.hostname and parts.port != 0 else "no host, or port 0"
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise ValueError(f"url={url!r}: {wrong}; expected host:port, such as 127.0.0.1:8000")


@dataclass(frozen=True)
class Connection:
    """Checked connection options; attributes as in `ConnectionOptions`.

    Attributes:
        address: `host:port`; for HTTP optionally followed by a path.
    """

    protocol: Protocol
    address: str
    headers: dict[str, str] = field(default_factory=dict)
    ssl: bool = False
    root_certificates: str | None = None
    private_key: str | None = None
    certificate_chain: str | None = None
    connect_timeout: float = 10.0
    creds: Any = None
    keepalive_options: Any = None
    round_robin: bool = False
    channel_args: Sequence[tuple[str, Any]] | None = None
    ssl_context: ssl_module.SSLContext | None = None

    @classmethod
    def build(cls, url: str | None, protocol: str, options: ConnectionOptions) -> Connection:
        """Check a client's arguments.

        Raises:
            ValueError: a protocol other than "grpc" and "http", a URL with the other protocol's
                scheme, or an option that only the other protocol has.
            TypeError: an unknown option.
        """
        if protocol not in _DEFAULT_URLS:
            raise ValueError(f'protocol={protocol!r}: must be "grpc" or "http"')
        for name in (
            ("creds", "keepalive_options", "round_robin", "channel_args") if protocol == "http" else ("ssl_context",)
        ):
            if options.get(name) not in (None, False):
                raise ValueError(f'{name} is not an option of protocol="{protocol}"')
        scheme, found, address = (url or _DEFAULT_URLS[protocol]).partition("://")
        if not found:
            scheme, address = "", scheme
        schemes = _SCHEMES[protocol]
        if scheme and scheme not in schemes:
            allowed = " or ".join(f"{name}://" for name in schemes)
            raise ValueError(f"url={url!r}: with protocol={protocol!r} the scheme must be {allowed}, or left out")
        address = address.rstrip("/")
        if protocol == "http":
            _check_http_address(url, address)
        secure = bool(schemes.get(scheme) or options.get("ssl") or options.get("creds") or options.get("ssl_context"))
        rest: dict[str, Any] = {**options, "ssl": secure, "headers": dict(options.get("headers") or {})}
        return cls(protocol=protocol, address=address, **rest)  # type: ignore[arg-type]

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine; if so, the environment's proxies do not apply."""
        host = self.address.partition("/")[0].rpartition(":")[0].strip("[]")
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    # -- gRPC -----------------------------------------------------------------------------

    def grpc_headers(self) -> dict[str, str]:
        """Headers as gRPC metadata; its keys must be lower case."""
        return {name.lower(): value for name, value in self.headers.items()}

    def grpc_client_options(self) -> dict[str, Any]:
        """Keyword arguments for the `InferenceServerClient` of `tritonclient.grpc`."""
        return {
            "url": self.address,
            "ssl": self.ssl,
            "root_certificates": self.root_certificates,
            "private_key": self.private_key,
            "certificate_chain": self.certificate_chain,
            "creds": self.creds,
            "channel_args": self._channel_args() if self.channel_args is None else list(self.channel_args),
        }

    def _channel_args(self) -> list[tuple[str, Any]]:
        """tritonclient's arguments, and four more: by default, gRPC waits up to two minutes between connection
        attempts, far longer than a server needs to restart, and half a minute until it looks up a name again, although
        other servers can have taken its place; and all clients of a process share one TCP connection.
        """
        args: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", _INT32_MAX),
            ("grpc.max_receive_message_length", _INT32_MAX),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.dns_min_time_between_resolutions_ms", 1000),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self.is_loopback:
            args.append(("grpc.enable_http_proxy", 0))
        if self.round_robin:
            args.append(("grpc.lb_policy_name", "round_robin"))
        if self.keepalive_options is not None:
            alive = self.keepalive_options
            args += [
                ("grpc.keepalive_time_ms", alive.keepalive_time_ms),
                ("grpc.keepalive_timeout_ms", alive.keepalive_timeout_ms),
                ("grpc.keepalive_permit_without_calls", alive.keepalive_permit_without_calls),
                ("grpc.http2.max_pings_without_data", alive.http2_max_pings_without_data),
            ]
        return args

    # -- HTTP -----------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        """`http(s)://host:port[/path]`."""
        return f"{'https' if self.ssl else 'http'}://{self.address}"

    def tls_context(self) -> ssl_module.SSLContext:
        """The TLS context of HTTPS connections."""
        if self.ssl_context is not None:
            return self.ssl_context
        context = ssl_module.create_default_context(cafile=self.root_certificates)
        if self.certificate_chain is not None:
            context.load_cert_chain(self.certificate_chain, self.private_key)
        return context
