"""The device runs steps whenever it likes; no buffer is rewritten before its reader has ended."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, make_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lazy_queue import LazyQueue
from offline import make_core, make_device_core, run, tokens
from sampling_tables import new_table

from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.runner import base_runner as base
from inflight.runner import device_runner
from inflight.runner.device_runner import DeviceRunner
from inflight.runner.row_faults import RowFaults
from inflight.sampling.reference_sampling import ReferenceSampling
from inflight.sampling.rules import RULES

from .test_drafts import Replayer
from .test_generation import mixed_params, random_prompts

COUNT = 14
PROMPTS = random_prompts(COUNT, seed=11)
PARAMS = [mixed_params(index) for index in range(COUNT)]


POOLS: dict[str, dict[str, Any]] = {
    "roomy": dict(),
    "small": dict(num_gpu_blocks_override=66),
    "swapped": dict(num_gpu_blocks_override=66, swap_space="1MiB", preemption_mode="swap"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("queue"))


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> dict[tuple[int, int], list[int]]:
    return outputs(make_core(checkpoint))


def outputs(core: Any, stagger: int = 0) -> dict[tuple[int, int], list[int]]:
    deltas = run(core, PROMPTS, PARAMS, stagger)
    return {key: tokens(of_sequence) for key, of_sequence in deltas.items()}


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    eagerness=st.sampled_from([0.0, 0.3, 0.8]),
    pool=st.sampled_from(["roomy", "small", "swapped"]),
    drafts=st.booleans(),
    stagger=st.integers(0, 2),
)
def test_tokens_do_not_depend_on_when_the_device_runs(checkpoint, expected, seed, eagerness, pool, drafts, stagger):
    queue = LazyQueue(random.Random(seed), eagerness)
    core = make_device_core(checkpoint, queue, block_size=4, max_num_batched_tokens=64, max_num_seqs=6, **POOLS[pool])
    if drafts:
        core.scheduler.policies.drafter = Replayer(expected, wrong=3)
    assert outputs(core, stagger) == expected
    assert queue.most_waiting >= 2 or eagerness


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), pool=st.sampled_from(sorted(POOLS)), drafts=st.booleans())
def test_requests_that_are_aborted_leave_nothing_in_those_that_take_their_slots(
    checkpoint, expected, seed, pool, drafts
):
    """Aborts come while steps of the request run; what it had produced by then was right."""
    rng = random.Random(seed)
    core = make_device_core(
        checkpoint, LazyQueue(rng, 0.2), block_size=4, max_num_batched_tokens=64, max_num_seqs=3, **POOLS[pool]
    )
    if drafts:
        core.scheduler.policies.drafter = Replayer(expected, wrong=3)
    got: dict[tuple[int, int], list[int]] = {}
    finished, aborted = set(), set()
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS)):
        assert core.add_request(AddRequest(number, prompt, params)) is None
    while core.has_work:
        for delta in core.step().deltas:
            key = delta.request_id, delta.index
            got.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                finished.add(key)
        check_core(core)
        if rng.random() < 0.15:
            number = rng.randrange(COUNT)
            if (number, 0) not in finished:
                core.abort(number)
                aborted.add((number, 0))
    assert finished | aborted == expected.keys()
    for key, token_ids in got.items():
        assert token_ids == expected[key][: len(token_ids)]
        assert key in aborted or token_ids == expected[key]


def test_a_launch_waits_for_nothing_unless_the_ring_is_full(checkpoint, expected):
    """By then the device has run only the work that the host waited for."""
    queue = LazyQueue(random.Random(0), eagerness=0.0)
    core = make_device_core(checkpoint, queue)
    launch, waits = core.runner.launch, []

    def counting(out: Any) -> Any:
        before = queue.num_waits
        ticket = launch(out)
        waits.append(queue.num_waits - before)
        return ticket

    core.runner.launch = counting
    assert outputs(core) == expected
    assert set(waits) == {0}
    assert core.runner.num_collected_first == 0


def test_more_steps_in_flight_than_the_ring_has_places_are_read_ahead(checkpoint, expected):
    queue = LazyQueue(random.Random(1), eagerness=0.0)
    core = make_device_core(checkpoint, queue)
    core._max_launched = 4
    assert outputs(core) == expected
    assert queue.most_waiting <= 2


def test_the_fake_device_notices_a_buffer_that_is_rewritten_too_early(checkpoint, expected, monkeypatch):
    monkeypatch.setattr(device_runner, "_RING", 1)
    monkeypatch.setattr(DeviceRunner, "_next_buffers", lambda self: self._ring[0])
    kernel = ReferenceSampling()  # the compiled one trusts its columns, which are overwritten
    monkeypatch.setattr(base, "select_sampling", lambda device: kernel)
    core = make_device_core(checkpoint, LazyQueue(random.Random(2), eagerness=0.0))
    with contextlib.suppress(IndexError, RuntimeError):  # where an index was overwritten
        assert outputs(core) != expected


def test_collecting_waits_for_that_step_only(checkpoint):
    queue = LazyQueue(random.Random(3), eagerness=0.0)
    core = make_device_core(checkpoint, queue)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert core.add_request(AddRequest(0, [1, 2, 3], params)) is None
    while core.has_work:
        core.step()
        assert len(queue._work) == len(core._launched), "the step behind has not run"


def test_a_rule_that_reads_tokens_waits_for_the_step_before(checkpoint):
    """Those of a CPU do: bad words are matched on the host."""
    words = SamplingParams(temperature=1.0, seed=3, bad_words_ids=[[i, i + 1] for i in range(150)], max_tokens=12)
    plain = SamplingParams(temperature=1.0, seed=4, max_tokens=30)
    prompts, params = random_prompts(2, seed=5), [words, plain]
    expected = run(make_core(checkpoint), prompts, params)
    core = make_device_core(checkpoint, LazyQueue(random.Random(4), eagerness=0.0))
    core.runner.table = new_table(core.config.max_num_seqs, VOCAB, "cpu", RULES)
    core.runner.faults = RowFaults(core.runner.table, core.info.eos_token_ids)
    got = run(core, prompts, params)
    assert {key: tokens(deltas) for key, deltas in got.items()} == {k: tokens(d) for k, d in expected.items()}
    assert 10 <= core.runner.num_collected_first <= 12
    assert core.step().stats.collected_first_total == core.runner.num_collected_first


class TimedQueue:
    """A device with a clock: each piece of work takes `seconds`, and begins when the one before it has ended.

    The host's clock is `now`; it goes on by a tick when it is read, and to an event's time when that is waited for.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = self.device = 1000.0
        self.num_events = 0

    def monotonic(self) -> float:
        self.now += 1e-4
        return self.now

    def submit(self, work: Any) -> None:
        self.device = max(self.device, self.now)
        work()

    def event(self) -> TimedEvent:
        self.num_events += 1
        return TimedEvent(self, self.seconds / 2 if self.num_events % 3 else 0.0)  # a step's last event ends it

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class TimedEvent:
    def __init__(self, queue: TimedQueue, work: float) -> None:
        self.queue, self.work = queue, work
        self.time = 0.0

    def record(self) -> None:
        self.time = self.queue.device
        self.queue.device += self.work

    def query(self) -> bool:
        return self.queue.now >= self.time

    def synchronize(self) -> None:
        self.queue.now = max(self.queue.now, self.time)

    def elapsed_time(self, end: TimedEvent) -> float:
        return 1e3 * (end.time - self.time)


@pytest.mark.parametrize("late", [0.0, 0.7], ids=["the host waits", "the host comes late"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_s_times_are_the_device_s_on_the_host_s_clock(checkpoint, monkeypatch, late: float, ahead: bool):
    """Steps neither overlap nor end after they were collected, whenever the host looks."""
    queue = TimedQueue(seconds=0.5)
    core = make_device_core(checkpoint, queue, async_scheduling=ahead)
    monkeypatch.setattr(device_runner, "time", queue)
    collect, steps = core.runner.collect, []

    def watched(ticket: Any) -> Any:
        queue.now += late
        step = collect(ticket)
        steps.append((step, ticket.started.time, ticket.ended.time, queue.now))
        return step

    core.runner.collect = watched
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert core.add_request(AddRequest(0, [1, 2, 3], params)) is None
    last = 0.0
    while core.has_work:
        core.step()
    for step, started, ended, collected in steps:
        assert step.ended - step.started == pytest.approx(ended - started)
        assert step.started < step.forward_end < step.ended <= collected
        assert step.ended == pytest.approx(ended, abs=1e-2)
        assert step.started >= last - 1e-2
        last = step.ended
