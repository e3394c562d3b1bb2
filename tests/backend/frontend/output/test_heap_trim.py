"""Memory that large responses took returns to the system."""

from __future__ import annotations

import threading
from pathlib import Path

from inflight.frontend.output.heap_trim import LARGE_BYTES, HeapTrim


def resident() -> int:
    """Bytes of memory that are not mapped from a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def timers() -> list[threading.Timer]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_freed_texts_between_others_return_their_pages() -> None:
    texts = [bytes(3000) for _ in range(40_000)]
    before = resident()
    kept = texts[:: len(texts) - 1]
    del texts
    HeapTrim().sent(LARGE_BYTES)
    assert len(timers()) == 1
    timers()[0].join(30)
    assert before - resident() > 60 * 2**20
    assert len(kept) == 2


def test_only_large_responses_count_and_several_are_one_trim() -> None:
    heap, began = HeapTrim(), len(timers())
    for _ in range(1000):
        heap.sent(LARGE_BYTES - 1)
    assert len(timers()) == began
    for _ in range(10):
        heap.sent(LARGE_BYTES)
    assert len(timers()) == began + 1
    for timer in timers():
        timer.join(30)
    heap.sent(LARGE_BYTES)
    assert len(timers()) == 1
    timers()[0].cancel()
