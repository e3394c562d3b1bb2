"""The KV events of an engine, as its options ask for them.  No torch."""

from __future__ import annotations

import importlib
from collections.abc import Collection

from inflight.config import ConfigError, EngineConfig
from inflight.engine.events import EngineListener
from inflight.engine.kv_events.block_events import BlockEvents
from inflight.engine.kv_events.endpoint import expect_usable
from inflight.engine.kv_events.known_blocks import EventSink
from inflight.engine.kv_events.publisher import ZmqPublisher
from inflight.engine.kv_events.recorded_pool import RecordedPool, RecordedTieredPool
from inflight.engine.kv_pool import KVPool
from inflight.engine.tiers.tiered_pool import TieredPool

__all__ = ["KVEvents", "expect_kv_events", "make_kv_events"]


class KVEvents:
    """Makes pools whose blocks are told of; see `assembly.Recorder`."""

    def __init__(self, sink: EventSink) -> None:
        self.sink = sink

    def pool(self, num_blocks: int, block_size: int) -> tuple[KVPool, EngineListener]:
        events = BlockEvents(self.sink, block_size)
        return RecordedPool(events, num_blocks, block_size), events

    def tiered_pool(
        self, num_blocks: int, block_size: int, longest: int, reserved: Collection[int]
    ) -> tuple[TieredPool, EngineListener]:
        events = BlockEvents(self.sink, block_size)
        return RecordedTieredPool(events, num_blocks, block_size, longest, reserved), events

    def totals(self) -> tuple[int, int]:
        return self.sink.num_batches, self.sink.num_dropped

    def close(self) -> None:
        self.sink.close()


def expect_kv_events(config: EngineConfig) -> None:
    """To be called before a checkpoint is loaded, which takes long.

    Raises:
        ConfigError: `kv_events_config` asks for what cannot be had.
    """
    options = config.kv_events_config
    if options is None or not options.enable_kv_cache_events or options.publisher == "null":
        return
    if not config.enable_prefix_caching:
        raise ConfigError("kv_events_config with enable_prefix_caching=false: there is no cache to tell of; remove one")
    expect_usable(options)
    try:
        importlib.import_module("zmq")
    except ImportError:
        raise ConfigError(
            'kv_events_config: publisher="zmq" needs the package pyzmq: pip install "triton-inflight[kv-events]"'
        ) from None


def make_kv_events(config: EngineConfig) -> KVEvents | None:
    """The KV events that `kv_events_config` asks for; None if it asks for none.

    Raises:
        ConfigError: they cannot be had.
    """
    expect_kv_events(config)
    options = config.kv_events_config
    if options is None or not options.enable_kv_cache_events or options.publisher == "null":
        return None
    return KVEvents(ZmqPublisher(options, config.block_size))
