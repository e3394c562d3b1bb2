"""Publishers of KV events for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from inflight.engine.kv_events.publisher import ZmqPublisher
from inflight.kv_events_config import KVEventsConfig


@contextmanager
def publishing(
    endpoint: str, block_size: int = 4, clock: Callable[[], float] = time.monotonic, **options: Any
) -> Iterator[ZmqPublisher]:
    made = ZmqPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, **options), block_size, clock)
    try:
        yield made
    finally:
        made.close()
