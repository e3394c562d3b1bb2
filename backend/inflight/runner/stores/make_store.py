"""The store of an entry of `kv_tiers`.  No torch."""

from __future__ import annotations

from pathlib import Path

from inflight.config import ConfigError, parse_bytes
from inflight.engine.tiers.base import KVStore
from inflight.kv_tiers_config import KVTier
from inflight.runner.stores.directory import DirectoryStore
from inflight.runner.stores.host import HostStore
from inflight.runner.stores.lmcache_store import LMCacheStore
from inflight.runner.stores.named_peers import NamedPeers
from inflight.runner.stores.peer_address import host_and_port, is_name
from inflight.runner.stores.peer_store import PeerStore
from inflight.runner.stores.redis_store import RedisStore, without_password

__all__ = ["make_store"]


def make_store(tier: KVTier, namespace: str, secret: bytes = b"") -> KVStore:
    """A store for the KV of one namespace, as hexadecimal digits.  Touches neither disk nor network.

    Args:
        secret: of `kv_store_secret_file`, which a peer asks for.

    Raises:
        ConfigError: a package or the file with the password is missing; not a Redis URL, or a password in both places.
    """
    if tier.type == "host":
        return HostStore(parse_bytes(tier.size or 0))
    if tier.path is not None:
        return DirectoryStore(Path(tier.path).expanduser().absolute(), namespace, parse_bytes(tier.size or 0))
    assert tier.url is not None
    if tier.type == "peer":
        host, port = host_and_port(tier.url)
        return (NamedPeers if is_name(host) else PeerStore)(host, port, bytes.fromhex(namespace), secret)
    if tier.type == "lmcache":
        return _lmcache(tier.url, namespace)
    password = _password(tier.password_file)
    if password is not None and without_password(tier.url) != tier.url:
        raise ConfigError("kv_tiers: there is a password in url and in password_file; remove the one in url")
    try:
        return RedisStore(tier.url, namespace, password)
    except ImportError:
        raise ConfigError('kv_tiers: type="redis" needs the package redis: pip install "triton-inflight[kv]"') from None
    except ValueError:  # its text can contain a part of the password
        raise ConfigError(
            "kv_tiers: url is not like redis://user:password@host:6379/0; write a / in a password as %2F"
        ) from None


def _lmcache(url: str, namespace: str) -> LMCacheStore:
    try:
        return LMCacheStore(url, namespace)
    except ImportError:
        raise ConfigError(
            'kv_tiers: type="lmcache" needs the package pyzmq: pip install "triton-inflight[lmcache]"'
        ) from None


def _password(file: str | None) -> str | None:
    """The first line of the file."""
    if file is None:
        return None
    try:
        return Path(file).expanduser().read_text(encoding="utf-8").split("\n", 1)[0].rstrip("\r")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"kv_tiers: password_file={file!r} cannot be read: {error}") from None
