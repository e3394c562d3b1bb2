"""Steps in flight on a device: the host waits for a step only to read it, and knows when the device ran it.

`tests/backend/emulated/test_engine_on_a_card.py` has engines on a card that works as late as it can, or at random
moments.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from card_rig import card, card_core, functions_as_kernels
from checkpoints import VOCAB, make_checkpoint
from emulated_card import Card
from offline import make_core, make_device_core, run, tokens
from sampling_tables import new_table

from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.runner import device_runner
from inflight.runner.row_faults import RowFaults
from inflight.sampling.rules import RULES

from .test_generation import mixed_params, random_prompts

__all__ = ["card"]

COUNT = 8
PROMPTS = random_prompts(COUNT, seed=11)
PARAMS = [mixed_params(index) for index in range(COUNT)]
LIMITS: dict[str, Any] = dict(max_model_len=256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("queue"))


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> dict[tuple[int, int], list[int]]:
    return outputs(make_core(checkpoint, **LIMITS))


@pytest.fixture
def kernels(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    functions_as_kernels(monkeypatch)


def outputs(core: Any) -> dict[tuple[int, int], list[int]]:
    return {key: tokens(of_sequence) for key, of_sequence in run(core, PROMPTS, PARAMS).items()}


def waits_of_launches(core: Any, card: Card) -> list[int]:
    """How often each launch from now on waits for work that the card has not done."""
    launch, waits = core.runner.launch, []

    def counting(out: Any) -> Any:
        before = card.num_waits
        ticket = launch(out)
        waits.append(card.num_waits - before)
        return ticket

    core.runner.launch = counting
    return waits


@pytest.mark.usefixtures("kernels")
def test_a_launch_waits_for_nothing_unless_the_ring_is_full(checkpoint: str, expected: Any, card: Card) -> None:
    """By then the device has run only the work that the host waited for."""
    core = card_core(checkpoint, **LIMITS)
    waits = waits_of_launches(core, card)
    assert outputs(core) == expected
    assert set(waits) == {0}
    assert core.runner.num_collected_first == 0


@pytest.mark.usefixtures("kernels")
def test_more_steps_in_flight_than_the_ring_has_places_are_read_ahead(
    checkpoint: str, expected: Any, card: Card
) -> None:
    core = card_core(checkpoint, **LIMITS)
    core._max_launched = 4
    waits = waits_of_launches(core, card)
    assert outputs(core) == expected
    assert set(waits) == {0, 1}


@pytest.mark.usefixtures("kernels")
def test_collecting_waits_for_that_step_only(checkpoint: str) -> None:
    core: Any = card_core(checkpoint, **LIMITS)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert core.add_request(AddRequest(0, [1, 2, 3], params)) is None
    numbers = []
    while core.has_work:
        core.step()
        behind = [launched.ticket.ended for launched in core._launched]
        assert all(event._stream.done < event._number for event in behind), "the step behind has not run"
        numbers.append(len(behind))
    assert max(numbers) == 1


def test_a_rule_that_reads_tokens_waits_for_the_step_before(checkpoint: str) -> None:
    """Those of a CPU do: bad words are matched on the host."""
    words = SamplingParams(temperature=1.0, seed=3, bad_words_ids=[[i, i + 1] for i in range(150)], max_tokens=12)
    plain = SamplingParams(temperature=1.0, seed=4, max_tokens=30)
    prompts, params = random_prompts(2, seed=5), [words, plain]
    expected = run(make_core(checkpoint), prompts, params)
    core: Any = make_device_core(checkpoint)
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
