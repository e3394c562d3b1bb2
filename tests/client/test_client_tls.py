"""TLS and headers, through a forwarder that terminates TLS in front of the real server."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from forwarder import Forwarder

from inflight_client import AsyncClient, Client, RetryPolicy, ServerUnreachableError
from inflight_tools.ports import pick_ports

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """PEM files of a self-signed certificate for 127.0.0.1 and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    folder: Path = tmp_path_factory.mktemp("tls")
    chain, key = str(folder / "chain.pem"), str(folder / "key.pem")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", chain]
    subprocess.run(command + names, check=True, capture_output=True)
    return chain, key


@pytest.fixture(params=[False, True], ids=["", "mutual"])
def mutual(request: pytest.FixtureRequest) -> bool:
    """Whether the server also requires a client certificate."""
    return bool(request.param)


@pytest.fixture
def secured(address: str, protocol: str, certificate: tuple[str, str], mutual: bool) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.set_alpn_protocols(["h2"] if protocol == "grpc" else ["http/1.1"])
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificate[0])
    with Forwarder(pick_ports(1)[0], address, context) as forwarder:
        yield forwarder.address


def options(certificate: tuple[str, str], mutual: bool) -> dict[str, Any]:
    chain, key = certificate
    return {"root_certificates": chain} | ({"certificate_chain": chain, "private_key": key} if mutual else {})


def test_tls(secured: str, protocol: Any, certificate: tuple[str, str], mutual: bool) -> None:
    tls = options(certificate, mutual)
    with Client(secured, protocol=protocol, model="scripted", ssl=True, retries=ONCE, **tls) as client:
        assert client.ready()
        assert client.generate("over TLS").text == "over TLS"


async def test_tls_asyncio(secured: str, protocol: Any, certificate: tuple[str, str], mutual: bool) -> None:
    tls = options(certificate, mutual)
    async with AsyncClient(secured, protocol=protocol, model="scripted", ssl=True, retries=ONCE, **tls) as client:
        assert (await client.generate("over TLS")).text == "over TLS"


def test_an_untrusted_server_is_rejected(secured: str, protocol: Any) -> None:
    with (
        Client(secured, protocol=protocol, model="scripted", ssl=True, retries=ONCE) as client,
        pytest.raises(ServerUnreachableError),
    ):
        client.generate("over TLS")


def test_ready_made_credentials(secured: str, protocol: Any, certificate: tuple[str, str], mutual: bool) -> None:
    chain, key = certificate
    made: dict[str, Any]
    if protocol == "grpc":
        pem, own = Path(chain).read_bytes(), Path(key).read_bytes()
        made = {"creds": grpc.ssl_channel_credentials(pem, *((own, pem) if mutual else ()))}
    else:
        made = {"ssl_context": ssl.create_default_context(cafile=chain)}
        if mutual:
            made["ssl_context"].load_cert_chain(chain, key)
    with Client(secured, protocol=protocol, model="scripted", retries=ONCE, **made) as client:
        assert client.generate("over TLS").text == "over TLS"
