"""The threads of a tier end with it, even if its store hangs when it is closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from kv_memory import MemoryStore

from inflight.engine.tiers.base import Frames
from inflight.engine.tiers.seal import Seal
from inflight.engine.tiers.tier import Tier
from inflight.runner.tier_threads import TierThreads


class HangingStore(MemoryStore):
    """Answers and writes once `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answers, self.called = threading.Event(), threading.Event()
        self.num_written = 0

    def find(self, keys: Sequence[bytes]) -> int:
        self.called.set()
        self.answers.wait()
        return super().find(keys)

    def store(self, key: bytes, frames: Frames) -> bool:
        self.called.set()
        self.answers.wait()
        self.num_written += 1
        return super().store(key, frames)


@pytest.mark.parametrize("hangs", ["find", "store"])
def test_they_end_when_a_store_that_hung_at_its_close_answers(hangs: str) -> None:
    store = HangingStore()
    tier = Tier("hanging", store, Seal(bytes(16)), TierThreads)
    tier.load(b"\0" * 16, lambda read: False).result()  # two threads, without a task when it is closed
    begin: dict[str, Callable[[], object]] = {
        "find": lambda: tier.find([b"\0" * 16]),
        "store": lambda: [tier.store(bytes([n]) * 16, lambda: [memoryview(b"extent")]) for n in range(3)],
    }
    begin[hangs]()
    store.called.wait()
    started = [thread for thread in threading.enumerate() if thread.name.startswith("hanging-")]
    assert len(started) == 3
    tier.close(0.0)
    store.answers.set()
    deadline = time.monotonic() + 60
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), thread.name
    assert store.num_written == (hangs == "store"), "what waited behind it is left out"
