"""Addresses of `kv_listen` and of peers, and which of them need a secret.  No torch."""

from __future__ import annotations

import ipaddress
import re

from inflight.config import ConfigError, EngineConfig

__all__ = ["expect_private", "host_and_port", "is_name"]

_ADDRESS = re.compile(r"([^/:@\s\[\]]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")


def expect_private(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: an address cannot be used, or KV would cross a network without a secret.
    """
    addresses = {} if config.kv_listen is None else {"kv_listen": config.kv_listen}
    if addresses and not any(tier.type == "host" for tier in config.kv_tiers):
        raise ConfigError('kv_listen lets others read host memory: add {"type": "host", "size": "4GiB"} to kv_tiers')
    for index, tier in enumerate(config.kv_tiers):
        if tier.type == "peer" and tier.write != "all":
            raise ConfigError(f'kv_tiers[{index}]: type="peer" is only read; remove write')
        if tier.type == "peer":
            addresses[f"kv_tiers[{index}].url"] = tier.url or ""
    for name, address in addresses.items():
        try:
            host, _ = host_and_port(address)
        except ValueError:
            raise ConfigError(
                f"{name}={address!r} is not like {'' if name == 'kv_listen' else 'tcp://'}10.0.0.5:7090"
            ) from None
        if config.kv_store_secret_file is None and not _is_loopback(host):
            raise ConfigError(
                f"{name}={address!r} is not on this machine's loopback, so it needs kv_store_secret_file, the same for "
                "all engines; make the secret with: openssl rand -hex 32"
            )


def host_and_port(address: str) -> tuple[str, int]:
    """Of `host:port` or `[IPv6 address]:port`, perhaps behind `tcp://`.

    Raises:
        ValueError: it is neither.
    """
    found = _ADDRESS.fullmatch(address.removeprefix("tcp://"))
    if found is None or not 0 < int(found[2]) < 2**16:
        raise ValueError(address)
    return found[1].strip("[]"), int(found[2])


def is_name(host: str) -> bool:
    """Whether it can have several addresses, each of another engine."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def _is_loopback(host: str) -> bool:
    """Of a name only if it is "localhost": another one can be made to mean any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
