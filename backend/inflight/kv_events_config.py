"""`kv_events_config` of a `model.json`: where the engine tells which blocks its prefix cache has.  No torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["KVEventsConfig"]

_Count = Annotated[int, Meta(ge=1, le=2**30)]


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV events, with vLLM's keys and defaults, for routers that send a prompt to the engine that has its prefix.

    Attributes:
        enable_kv_cache_events: publish which blocks enter and leave the prefix cache, with the token ids in them.
        publisher: "zmq", or "null" for nothing.
        endpoint: of the socket. tcp://*:5557 listens on every interface, where all who reach the port can read token
            ids of prompts; tcp://lo:5557 on one interface; ipc:///run/kv.sock on a Unix socket. With the name or
            address of a host, the engine connects to a subscriber that listens there.
        replay_endpoint: where subscribers can ask for batches that they missed; None: nowhere.
        buffer_steps: batches that are kept for that, up to 64 MiB.
        hwm: batches that wait for a slow subscriber; it misses further ones.
        max_queue_size: batches that wait for the publishing thread; further ones are dropped, and all blocks forgotten.
        topic: first frame of each message. llm-d wants "kv@<pod>@<model>".
        data_parallel_rank: number of this engine among a model's; ports are larger by it. Triton's GPUs count up.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: _Count = 10_000
    hwm: _Count = 100_000
    max_queue_size: _Count = 100_000
    topic: str = ""
    data_parallel_rank: Annotated[int, Meta(ge=0, le=1023)] = 0
