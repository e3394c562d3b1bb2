"""The times of traced requests, on the first and the last delta of each sequence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engine_rig import Info, add, make_core

from inflight.config import EngineConfig
from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.engine.deltas import SequenceDelta
from inflight.engine.messages import decode_to_frontend, encode
from inflight.engine.request_times import RequestTimes, make_request_times

TRACED = {"attached": Attached(traced=True)}


def traced_core(**options: Any) -> tuple[EngineCore, RequestTimes]:
    """An engine whose clock shows how often it was read, and its listener."""
    ticks = itertools.count(1)
    listener = RequestTimes(lambda: float(next(ticks)))
    return make_core(options.pop("info", Info()), listeners=[listener], **options), listener


def deltas(core: EngineCore) -> dict[tuple[int, int], list[SequenceDelta]]:
    """Those of each sequence, after a trip through the pipe, until nothing is left to do."""
    found: dict[tuple[int, int], list[SequenceDelta]] = {}
    while core.has_work:
        message: Any = decode_to_frontend(encode(core.step()))
        for delta in message.deltas:
            found.setdefault((delta.request_id, delta.index), []).append(delta)
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_first_and_last_delta_have_the_times_of_a_traced_request(ahead: bool) -> None:
    core, listener = traced_core(max_num_batched_tokens=8, async_scheduling=ahead)
    add(core, 1, [5 + k for k in range(20)], TRACED, max_tokens=6, ignore_eos=True)
    add(core, 2, [7] * 3, max_tokens=6, ignore_eos=True)
    found = deltas(core)
    first, *between, last = found[1, 0]
    assert first.times is not None and (first.times.admitted, first.times.prefill_steps) == (1.0, 3)
    assert last.times is not None and last.times.prefill_steps == 3
    assert last.times.decode_steps == 5 and not any(delta.times for delta in between)
    assert not any(delta.times for delta in found[2, 0])
    assert not (listener._sequences or listener._running or listener._ended)


def test_each_sequence_of_a_request_has_its_own() -> None:
    core, listener = traced_core(max_num_seqs=4)
    add(core, 1, [5, 6, 7], TRACED, n=3, temperature=1.0, max_tokens=4, ignore_eos=True)
    found = deltas(core)
    assert len(found) == 3
    for sequence in found.values():
        times = sequence[-1].times
        assert times is not None and times.prefill_steps + times.decode_steps >= 4
    assert len({sequence[-1].times.admitted for sequence in found.values() if sequence[-1].times}) == 3
    assert not (listener._sequences or listener._running)


def test_a_preempted_sequence_keeps_its_first_time_and_counts() -> None:
    core, listener = traced_core(info=Info(num_blocks=6), block_size=4, max_num_seqs=4, enable_prefix_caching=False)
    for number in (1, 2):
        add(core, number, [number, 5, 6, 7, 8, 9], TRACED, max_tokens=14, ignore_eos=True)
    found = deltas(core)
    preempted = [one for sequence in found.values() if (one := sequence[-1].times) is not None and one.preemptions]
    assert preempted and {times.admitted for times in preempted} <= {1.0, 2.0}
    assert not (listener._sequences or listener._running)


def test_an_aborted_request_is_forgotten() -> None:
    core, listener = traced_core()
    add(core, 1, [5, 6, 7], TRACED, max_tokens=50, ignore_eos=True)
    core.step()
    core.abort(1)
    add(core, 2, [5, 6, 7], max_tokens=2, ignore_eos=True)
    deltas(core)
    assert not (listener._sequences or listener._running or listener._ended)


def test_there_is_a_listener_only_with_the_option() -> None:
    assert make_request_times(EngineConfig(model="m")) == []
    assert make_request_times(EngineConfig(model="m", otlp_traces_endpoint="http://collector:4318"))
