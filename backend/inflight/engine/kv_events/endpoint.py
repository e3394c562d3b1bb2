"""Addresses of `kv_events_config`.  No torch."""

from __future__ import annotations

import re
import socket

from inflight.config import ConfigError
from inflight.kv_events_config import KVEventsConfig

__all__ = ["expect_room", "expect_usable", "listens", "of_rank"]

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
        if tcp is not None and tcp["host"] == "0.0.0.0":
            raise ConfigError(f"{got}: the engine would connect to that address; write * for the host, to listen")
    if options.replay_endpoint is not None and not listens(options.replay_endpoint):
        raise ConfigError(
            f"kv_events_config.replay_endpoint={options.replay_endpoint!r}: subscribers connect to it, so the engine "
            "listens there; write * for the host, or the name of a network interface"
        )
    if options.replay_endpoint == options.endpoint:
        raise ConfigError(f"kv_events_config: both endpoints are {options.endpoint!r}; give them different ports")


def expect_room(options: KVEventsConfig, num_engines: int) -> None:
    """
    Args:
        num_engines: of one model, each with ports larger by one than those of the engine before it.

    Raises:
        ConfigError: one's port would be another's replay port.
    """
    tcps = _TCP.fullmatch(options.endpoint), _TCP.fullmatch(options.replay_endpoint or "")
    if not options.enable_kv_cache_events or options.publisher == "null":
        return
    first, second = (0 if tcp is None else int(tcp["port"]) for tcp in tcps)
    if first and second and 0 < abs(first - second) < num_engines:
        raise ConfigError(
            f"kv_events_config: the ports {first} and {second} of {num_engines} engines on as many GPUs, each with the "
            f"next ones, would meet; put them {num_engines} or more apart, such as {first} and {_apart(first)}"
        )


def _apart(port: int) -> int:
    return port + 1000 if port + 2000 < _LAST_PORT else port - 1000


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
