"""Beats go through the sender thread, and other processes read them."""

from __future__ import annotations

import os
from collections.abc import Callable
from queue import SimpleQueue

from inflight.frontend.lifecycle.instance_registry import RegistryEntry, states_of
from inflight.frontend.lifecycle.stub_beat import StubBeat


def beats_of(entry: RegistryEntry) -> list[int]:
    return [state.beats for state in states_of(os.getpid()) if state.name == entry.name]


def test_a_beat_is_published_by_the_sender_and_one_waits_for_it_at_most() -> None:
    entry = RegistryEntry(f"beating-{os.getpid()}")
    sender: SimpleQueue[Callable[[], None]] = SimpleQueue()
    beat = StubBeat(entry.beat, sender.put, seconds=0.001)
    beat.start()
    for number in range(3):
        action = sender.get(timeout=20)
        assert not sender.qsize(), "a sender that hangs would collect beats"
        assert beats_of(entry) == [number]
        action()
    entry.set("draining")
    beat.stop()
    assert beats_of(entry) == [3], "a state does not end the count"
    entry.close()
    entry.beat()
    assert beats_of(entry) == []
