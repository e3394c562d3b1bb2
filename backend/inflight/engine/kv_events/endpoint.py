"""Addresses of `kv_events_config`.  No torch."""

from __future__ import annotations

import re
import socket

from inflight.config import ConfigError
from inflight.kv_events_config import KVEventsConfig

__all__ = ["expect_usable", "listens", "of_rank"]

_TCP = re.compile(r"tcp://(?P<host>[^/:@\s]+|\[[0-9a-fA-F:.]+(%\w+)?\]):(?P<port>\d{1,5})")
_IPC = re.compile(r"ipc://\S{1,100}")
_LAST_PORT = 65535


def expect_usable(options: KVEventsConfig) -> None:
    """
    Raises:
        ConfigError: an endpoint is none, or nothing can reach it.
    """
    endpoints = {"endpoint": options.endpoint, "replay_endpoint": options.replay_endpoint}
    for name, endpoint in endpoints.items():
        if endpoint is None:
            continue
        got, tcp = f"kv_events_config.{name}={endpoint!r}", _TCP.fullmatch(endpoint)
        if tcp is None and not _IPC.fullmatch(endpoint):
            raise ConfigError(f"{got} is not like tcp://*:5557 or ipc:///run/kv.sock")
        last = _LAST_PORT - options.data_parallel_rank
        if tcp is not None and not 0 < int(tcp["port"]) <= last:
            raise ConfigError(f"{got}: the port must be a number from 1 to {last}")
    if options.replay_endpoint is not None and not listens(options.replay_endpoint):
        raise ConfigError(
            f"kv_events_config.replay_endpoint={options.replay_endpoint!r}: subscribers connect to it, so the engine "
            "listens there; write * for the host, or the name of a network interface"
        )
    if options.replay_endpoint == options.endpoint:
        raise ConfigError(f"kv_events_config: both endpoints are {options.endpoint!r}; give them different ports")


def listens(endpoint: str) -> bool:
    """Whether a socket listens there, rather than connects: as vLLM decides it, and at the name of an interface."""
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None:
        return True
    return "*" in endpoint or "::" in endpoint or tcp["host"] in {name for _, name in socket.if_nameindex()}


def of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of one of several engines: its port is larger by `rank`, or its path ends with `_dp<rank>`."""
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None or not rank:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    return f"tcp://{tcp['host']}:{int(tcp['port']) + rank}"
