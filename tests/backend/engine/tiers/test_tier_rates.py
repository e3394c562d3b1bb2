"""A conversation of 8,000 tokens on media of all speeds, on a virtual clock: loading is never slower than computing."""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Mapping
from typing import Any

import pytest
from engine_rig import Info, add, next_token
from kv_memory import MemoryStore
from nightly import nightly_but
from tier_conversations import from_tiers
from tiers_rig import TieredRig

from inflight.engine.held_requests import HELD_POLL_SECONDS
from inflight.engine.policies import tier_admission
from inflight.engine.tiers.base import Fill, Frames

# The llama of 58 M parameters on two cores, as bench/kv_tiers.py measured it.
TOKEN_SECONDS = 5.9e-4  # to compute a token of a prompt
TOKEN_BYTES = 8 * 2 * 4 * 64 * 2
STEP_SECONDS = 6e-3  # of a step without a prompt
EXTENT_CPU_SECONDS = 3e-4
FIND_SECONDS = 2e-5  # to look for one extent
BLOCK, EXTENT_BLOCKS, LOADERS = 16, 8, 2
PROMPT = [1 + (n * n + n // 7) % 11 for n in range(8000)]
RATES = [10, 12, 14, 16, 17, 18, 20, 25, 40, 100, 300, 1000, 6000]  # MB/s; computing makes 14 MB/s of KV


class Medium(MemoryStore):
    """A store whose threads share a medium of some speed.  `pass_time` is all that happens on the clock of the engine.

    Attributes:
        rate: bytes a second.
        delay: seconds before the first byte of each extent.
        late: number of a load -> seconds that it takes longer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.delay = float("inf"), 0.0
        self.late: Mapping[int, float] = {}
        self._num_begun = 0
        self._free_at = [(0.0, thread) for thread in range(LOADERS)]
        self._in_progress: list[tuple[float, float, int, Any]] = []

    def attach(self, rig: TieredRig) -> None:
        self.rig = rig
        self._free_at = [(rig.now, thread) for thread in range(LOADERS)]
        self._in_progress = []
        self._num_begun = 0

    def load(self, key: bytes, frames: Frames) -> bool:
        self.rig.now += self._took
        return super().load(key, frames)

    def _seconds_of(self, frames: Frames) -> float:
        num_blocks = sum(frame.nbytes for frame in frames) // self.rig.runner.bytes_per_block
        return self.delay + num_blocks * BLOCK * TOKEN_BYTES * LOADERS / self.rate

    def _seconds_to_fill(self, fill: Fill) -> float:
        seconds = 0.0

        def look(frames: Frames) -> bool:
            nonlocal seconds
            seconds = self._seconds_of(frames)
            return False

        fill(look)
        self._num_begun += 1
        return seconds + self.late.get(self._num_begun - 1, 0.0)

    def pass_time(self, seconds: float) -> None:
        """Let the engine's thread be busy or wait for so long; the tier's threads do what they can meanwhile."""
        began, until = self.rig.now, self.rig.now + seconds
        self._begin_tasks(began)
        while self._in_progress and self._in_progress[0][0] <= until:
            end, start, thread, (future, work, args) = heapq.heappop(self._in_progress)
            self.rig.now, self._took = start, end - start
            self.rig.tiers.tiers[0]._began.pop(thread, None)
            future.set_result(work(*args))
            heapq.heappush(self._free_at, (end, thread))
            self._begin_tasks(end)
        self.rig.now = until

    def _begin_tasks(self, now: float) -> None:
        while self._free_at and self.rig.hand.tasks:
            future, work, args = self.rig.hand.tasks.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            free_at, thread = heapq.heappop(self._free_at)
            start = max(now, free_at)
            end = start
            if work.__name__ == "_find":
                end += FIND_SECONDS * len(args[0])
            elif work.__name__ == "_load":
                end += self._seconds_to_fill(args[1])
                self.rig.tiers.tiers[0]._began[thread] = start
            heapq.heappush(self._in_progress, (end, start, thread, (future, work, args)))


def engine(medium: Medium, max_num_seqs: int = 8, **options: Any) -> TieredRig:
    """Steps take the time that their tokens do."""
    info = Info(num_blocks=2200, max_model_len=9000)
    options = {"block_size": BLOCK, "max_num_batched_tokens": 512, "max_num_seqs": max_num_seqs, **options}
    rig = TieredRig(info, EXTENT_BLOCKS, [medium], cpu_seconds=EXTENT_CPU_SECONDS, **options)
    rig.check = lambda: None  # type: ignore[method-assign]
    rig.tiers.cpu_clock = rig.clock  # cores that nothing else uses
    medium.attach(rig)
    execute = rig.runner.execute

    def takes(out: Any, prepared: None) -> Any:
        step = execute(out, prepared)
        decoding = STEP_SECONDS if out.num_tokens > out.num_prompt_tokens else 0.0
        medium.pass_time(out.num_prompt_tokens * TOKEN_SECONDS + decoding + 1e-4)
        step.ended = rig.now
        return step

    rig.runner.execute = takes  # type: ignore[method-assign]
    return rig


def first_token(rig: TieredRig, medium: Medium, prompt: list[int], request_id: int) -> float:
    """Seconds until the request has it.  It is right, and so is the next one."""
    began = rig.now
    add(rig.core, request_id, prompt, max_tokens=2, ignore_eos=True)
    found: list[int] = []
    first = None
    while len(found) < 2:
        message = rig.core.step()
        assert not message.failed, message.failed
        found += [token for delta in message.deltas if delta.request_id == request_id for token in delta.token_ids]
        first = rig.now if found and first is None else first
        if not message.stats.batch_size:
            medium.pass_time(HELD_POLL_SECONDS)
    assert found[0] == next_token(prompt) and found[1] == next_token([*prompt, found[0]])
    assert first is not None
    return first - began


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", TOKEN_SECONDS)


@pytest.fixture(scope="module")
def extents() -> dict[bytes, bytes]:
    """Of the conversation."""
    return extents_of(PROMPT)


def extents_of(prompt: list[int]) -> dict[bytes, bytes]:
    return dict(_extents_of(tuple(prompt)))


@functools.cache
def _extents_of(prompt: tuple[int, ...]) -> dict[bytes, bytes]:
    medium = Medium()
    rig = engine(medium)
    first_token(rig, medium, list(prompt), 0)
    while rig.hand.tasks or medium._in_progress:
        medium.pass_time(1.0)
    assert len(medium.extents) >= len(prompt) // BLOCK // EXTENT_BLOCKS
    return medium.extents


@pytest.mark.parametrize("beside", [0, 4])
@pytest.mark.parametrize("delay", nightly_but([0.0], [0.0, 0.002, 0.05]))
def test_loading_is_never_slower_than_computing(extents: dict[bytes, bytes], delay: float, beside: int) -> None:
    """By more than a twentieth: the first time, which measures the medium, and the second.

    Args:
        delay: seconds before each extent, as of a machine far away.
        beside: streams that run meanwhile.
    """
    computed = seconds_of(None, {}, 0.0, beside)
    ratios = {}
    for rate in RATES:
        found = seconds_of(rate * 1e6, extents, delay, beside)
        ratios[rate] = [round(one / other, 3) for (one, _), (other, _) in zip(found, computed)]
    assert max(max(found) for found in ratios.values()) <= 1.05, ratios
    if not delay:
        assert max(ratios[6000]) < (0.35 if beside else 0.1), ratios


@pytest.mark.parametrize("beside", [0, 4])
@pytest.mark.parametrize("number", [0, 1, 30])
def test_a_late_read_does_not_end_a_load(extents: dict[bytes, bytes], number: int, beside: int) -> None:
    """It takes 0.3 s: 31 like it take longer than computing, and all others take a millisecond."""
    (usual, all_hits), _ = seconds_of(1e9, extents, 0.0, beside)
    (seconds, hits), _ = seconds_of(1e9, extents, 0.0, beside, {number: 0.3})
    assert all_hits == hits == 7936
    assert seconds < usual + 0.35


@pytest.mark.parametrize("beside", [0, 4])
@pytest.mark.parametrize("each", [0.2, 1.0, 60.0])
def test_a_medium_that_becomes_slow_is_given_up_in_time(extents: dict[bytes, bytes], each: float, beside: int) -> None:
    """Half of the conversation comes at once, and the rest at 10 MB/s, at 2, or not at all."""
    computed, _ = seconds_of(None, {}, 0.0, beside)
    (seconds, hits), _ = seconds_of(1e9, extents, 0.0, beside, dict.fromkeys(range(31, 62), each))
    assert hits >= 31 * BLOCK * EXTENT_BLOCKS
    assert seconds < 0.65 * computed[0]


def test_a_new_engine_learns_what_computing_takes_while_a_conversation_waits(
    extents: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It guesses an eighth, and computes other prompts for longer than that before the conversation has come."""
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", TOKEN_SECONDS / 8)
    medium = Medium()
    medium.rate = 50e6
    rig = engine(medium)
    medium.extents = dict(extents)
    for number in (1, 2):
        add(rig.core, number, [11 + number, *PROMPT[:511]], max_tokens=1)
    first_token(rig, medium, PROMPT, 0)
    assert rig.tiers.num_hits == 7936


@pytest.mark.parametrize(("rate", "num_loaded"), [(40e6, 2), (8e6, 0)])
def test_a_new_engine_learns_from_the_first_of_many_that_wait(
    monkeypatch: pytest.MonkeyPatch, rate: float, num_loaded: int
) -> None:
    """It guesses an eighth: the first conversation is given up, and what it takes to compute tells how long to wait."""
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", TOKEN_SECONDS / 8)
    medium = Medium()
    medium.rate = rate
    rig = engine(medium)
    conversations = [[13 + number, *PROMPT[:3000]] for number in range(3)]
    for number, prompt in enumerate(conversations):
        medium.extents.update(extents_of(prompt))
        add(rig.core, number, prompt, max_tokens=1)
    began = rig.now
    while rig.core.has_work:
        if not rig.core.step().stats.batch_size:
            medium.pass_time(HELD_POLL_SECONDS)
    in_one = 3000 // BLOCK // EXTENT_BLOCKS * EXTENT_BLOCKS * BLOCK
    assert num_loaded * in_one <= rig.tiers.num_hits < (num_loaded + 0.5) * in_one
    assert rig.now - began < 1.05 * (3 - num_loaded) * 3000 * TOKEN_SECONDS + num_loaded * 0.2


def test_of_many_that_return_to_a_new_engine_most_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compute one takes as long as to load four: in the step that computes the first one, the others would be late
    if each were alone."""
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", TOKEN_SECONDS / 8)
    medium = Medium()
    medium.rate = 60e6
    rig = engine(medium, max_num_seqs=32)
    conversations = [[13 + number, *PROMPT[:255]] for number in range(30)]
    for number, prompt in enumerate(conversations):
        medium.extents.update(extents_of([*prompt, 1]))
        add(rig.core, number, [*prompt, 1], max_tokens=1)
    began = rig.now
    while rig.core.has_work:
        if not rig.core.step().stats.batch_size:
            medium.pass_time(HELD_POLL_SECONDS)
    assert rig.tiers.num_hits >= 20 * 256
    assert rig.now - began < 30 * 256 * TOKEN_SECONDS / 2.5


def test_a_request_whose_question_is_open_does_not_give_up_because_a_later_one_was_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The later one asks no tier.  It is computed in a step that is longer than computing the first alone."""
    medium = Medium()
    rig = engine(medium)
    first, later = [13, *PROMPT[:256]], [14, *PROMPT[:500]]
    medium.extents.update(extents_of(first))
    add(rig.core, 0, first, max_tokens=1)
    add(rig.core, 1, later, max_tokens=1, prompt_logprobs=0)
    while rig.core.has_work:
        if not rig.core.step().stats.batch_size:
            medium.pass_time(HELD_POLL_SECONDS)
    assert rig.tiers.num_hits == 256


@pytest.mark.parametrize("options", [{}, {"scheduling_policy": "priority"}])
def test_a_short_prompt_does_not_wait_for_a_slow_medium_behind_a_long_one_that_it_overtakes(
    options: dict[str, Any],
) -> None:
    medium = Medium()
    medium.rate = 3e6
    rig = engine(medium, **options)
    short, other = [13, *PROMPT[:399]], [11, *PROMPT[:600]]
    first_token(rig, medium, [12, *PROMPT[:600]], 0)  # what computing takes is measured, and then the medium
    medium.extents = extents_of(short) | extents_of(other)
    first_token(rig, medium, other, 1)
    add(rig.core, 2, PROMPT, {"priority": 1, "arrival": rig.now}, max_tokens=1)
    while not rig.core.scheduler.running:
        medium.pass_time(HELD_POLL_SECONDS)
        rig.core.step()
    add(rig.core, 3, short, {"arrival": rig.now}, max_tokens=1)
    assert 3 in [delta.request_id for _ in range(3) for delta in rig.core.step().deltas]


def test_a_short_prompt_goes_before_longer_ones_and_a_stream_that_was_preempted_before_all() -> None:
    medium = Medium()
    rig = engine(medium)
    add(rig.core, 0, PROMPT, max_tokens=1)
    while not rig.core.scheduler.running:
        medium.pass_time(HELD_POLL_SECONDS)
        rig.core.step()
    rig.core.step()
    policy, [request] = from_tiers(rig), rig.core.scheduler.running
    assert policy._ahead_of(request, 20, ()) == 8000 - 512  # few blocks are left, but of a long prompt
    policy._short = request.num_tokens
    assert policy._ahead_of(request, 20, ()) == 0
    assert policy._ahead_of(request, 1000, ()) == 8000 - 512
    request.num_preemptions = 1
    assert policy._ahead_of(request, 1000, ()) == 0


@pytest.mark.parametrize("options", [{}, {"scheduling_policy": "priority"}])
def test_a_request_waits_while_a_later_prompt_is_computed_and_starts_before_the_next_one(
    options: dict[str, Any],
) -> None:
    """The medium needs 4.1 s; computing the first takes 2.4, and each of the later ones, which ask no tier, 4.7.  What
    has not come when one of them ends would be computed behind it."""
    medium = Medium()
    first, other = [13, *PROMPT[:3999]], [11, *PROMPT[:600]]
    medium.rate = 8e6
    rig = engine(medium, **options)
    first_token(rig, medium, [12, *PROMPT[:600]], 0)
    medium.extents = extents_of(first) | extents_of(other)
    first_token(rig, medium, other, 1)
    began = rig.now
    add(rig.core, 2, first, {"arrival": began}, max_tokens=1)
    for number in (3, 4):
        add(rig.core, number, [number, *PROMPT], {"arrival": began + number}, max_tokens=1, prompt_logprobs=0)
    found: dict[int, float] = {}
    while rig.core.has_work:
        found.update({delta.request_id: rig.now - began for delta in rig.core.step().deltas if delta.token_ids})
    assert sorted(found, key=found.__getitem__) == [3, 2, 4]
    assert found[2] < found[3] + 2 * 512 * TOKEN_SECONDS


def test_a_read_that_takes_a_second_is_not_waited_for(extents: dict[bytes, bytes]) -> None:
    """Computing takes 9.4 s, behind a prompt that has begun meanwhile, and asks no tier."""
    medium = Medium()
    rig = engine(medium)
    first_token(rig, medium, [12, *PROMPT[:600]], 0)
    medium.extents, medium.late = dict(extents), dict.fromkeys(range(62), 60.0)
    add(rig.core, 1, PROMPT, max_tokens=1)
    add(rig.core, 2, [13, *PROMPT], max_tokens=1, prompt_logprobs=0)
    began = rig.now
    rig.core.step()
    while rig.core.scheduler.held:
        rig.core.step()
    assert 1.0 < rig.now - began < 1.0 + 3 * 512 * TOKEN_SECONDS


POLICIES: list[dict[str, Any]] = [{}, {"scheduling_policy": "priority"}, {"short_prompt_share": 0.0}]


@pytest.mark.parametrize("seed", nightly_but([*range(8), 59, 723, 827, 878, 898], range(900)))
def test_no_first_token_is_much_later_than_without_a_medium(seed: int) -> None:
    """Than in 1.1 of the time, and two steps; but requests behind it, which start while it waits, are not stopped."""
    rng = random.Random(seed)
    arrivals = [
        (
            rng.choice([150, 300, 400, 700, 1000, 2000, 4000]),  # tokens
            rng.choice([0.0, rng.uniform(0.0, 2.0)]),  # when it arrives
            rng.randrange(3),  # priority
            rng.random() < 0.7,  # whether the medium has it
            rng.choice([None, None, None, 0]),  # prompt_logprobs: with them it asks no tier
        )
        for _ in range(rng.randint(1, 8))
    ]
    rate, share = 10 ** rng.uniform(6.3, 8.5), rng.choice([0.0, 0.05])
    late = {number: rng.choice([0.3, 1.0, 9.0]) for number in range(80) if rng.random() < share}
    options = rng.choice(POLICIES)
    found, computed = (first_tokens(arrivals, each, late, options) for each in (rate, None))
    for one, seconds in computed.items():
        began = arrivals[one][1]
        passed = sum(
            tokens
            for n, (tokens, at, *_) in enumerate(arrivals)
            if at + computed[n] > began + seconds and at + found[n] <= began + found[one]
        )
        assert found[one] < 1.1 * (seconds + passed * TOKEN_SECONDS) + 2 * 512 * TOKEN_SECONDS


def first_tokens(
    arrivals: list[Any], rate: float | None, late: dict[int, float], options: dict[str, Any]
) -> dict[int, float]:
    """Request -> seconds until its first token, in an engine that has measured itself and the medium."""
    medium = Medium()
    rig = engine(medium, 16, **options)
    first_token(rig, medium, [12, *PROMPT[:600]], 99)
    if rate is not None:
        medium.rate = rate
        medium.extents = extents_of([11, *PROMPT[:600]])
        first_token(rig, medium, [11, *PROMPT[:600]], 98)
        for number, (tokens, _, _, is_stored, _) in enumerate(arrivals):
            medium.extents |= extents_of([20 + number, *PROMPT[: tokens - 1]]) if is_stored else {}
    medium.late, medium._num_begun = late, 0
    began, found, waiting = rig.now, dict[int, float](), list(enumerate(arrivals))
    while waiting or rig.core.has_work:
        for entry in [entry for entry in waiting if began + entry[1][1] <= rig.now]:
            waiting.remove(entry)
            number, (tokens, at, priority, _, logprobs) = entry
            fields = {"arrival": began + at, "priority": priority}
            prompt = [20 + number, *PROMPT[: tokens - 1]]
            add(rig.core, number, prompt, fields, max_tokens=1, prompt_logprobs=logprobs)
        message = rig.core.step()
        for delta in message.deltas:
            if delta.request_id < 90 and delta.token_ids:
                found[delta.request_id] = rig.now - began - arrivals[delta.request_id][1]
        if not message.stats.batch_size:
            medium.pass_time(HELD_POLL_SECONDS)
    return found


def test_a_new_engine_learns_from_a_prompt_whose_larger_half_was_found(
    extents: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", TOKEN_SECONDS / 8)
    other = [13, *PROMPT[:3000]]
    medium = Medium()
    rig = engine(medium)
    medium.extents = extents | extents_of(other[:1700])
    add(rig.core, 1, other, max_tokens=1)
    while not rig.core.scheduler.running:
        medium.pass_time(HELD_POLL_SECONDS)
        rig.core.step()
    assert rig.tiers.num_hits == 1696
    medium.rate = 150e6
    first_token(rig, medium, PROMPT, 0)
    assert rig.tiers.num_hits == 1696 + 7936


def test_a_new_engine_learns_that_it_waits_too_long(
    extents: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It guesses eight times the time to compute, and the medium takes less than that, but twice the time itself."""
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", TOKEN_SECONDS * 8)
    medium = Medium()
    medium.rate = TOKEN_BYTES / TOKEN_SECONDS / 2
    rig = engine(medium)
    medium.extents = dict(extents)
    for number in (1, 2):
        add(rig.core, number, [11 + number, *PROMPT[:511]], max_tokens=1)
    others = 2 * 512 * TOKEN_SECONDS
    assert first_token(rig, medium, PROMPT, 0) < others + 1.1 * len(PROMPT) * TOKEN_SECONDS
    assert 0 < rig.tiers.num_hits < 7936 / 2


def test_no_request_waits_longer_than_a_minute(extents: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a third of one.  The only prompt that was computed took a thousand times as long as any other one will."""
    monkeypatch.setattr(tier_admission, "_LONGEST_WAIT", 20.0)
    monkeypatch.setitem(globals(), "HELD_POLL_SECONDS", 0.05)  # fewer steps
    medium = Medium()
    medium.rate = 3e6
    rig = engine(medium)
    execute = rig.runner.execute

    def late(out: Any, prepared: None) -> Any:
        step = execute(out, prepared)
        medium.pass_time(1000 * out.num_prompt_tokens * TOKEN_SECONDS)
        step.ended = rig.now
        return step

    rig.runner.execute = late  # type: ignore[method-assign]
    first_token(rig, medium, [12, *PROMPT[:600]], 1)
    rig.runner.execute = execute  # type: ignore[method-assign]
    medium.extents = dict(extents)
    assert 20 < first_token(rig, medium, PROMPT, 0) < 21 + len(PROMPT) * TOKEN_SECONDS
    assert 0 < rig.tiers.num_hits < 7936


def seconds_of(
    rate: float | None, extents: dict[bytes, bytes], delay: float, beside: int, late: Mapping[int, float] | None = None
) -> list[tuple[float, int]]:
    """Of a new engine: to the first token of the conversation, two times, and the tokens that came from the medium."""
    medium = Medium()
    medium.late = late or {}
    medium.rate, medium.delay = rate or float("inf"), delay
    rig = engine(medium)
    found = []
    for turn in range(2):
        rig.new_core()  # nothing is cached
        first_token(rig, medium, [12 + turn, *PROMPT[:600]], 10 * turn)  # what computing takes is measured
        medium.extents = dict(extents)
        streams = range(10 * turn + 2, 10 * turn + 2 + beside)
        for number in streams:
            add(rig.core, number, [14, number], max_tokens=8000, ignore_eos=True)
        hits = rig.tiers.num_hits
        seconds = first_token(rig, medium, PROMPT, 10 * turn + 1)
        found.append((seconds, rig.tiers.num_hits - hits))
        for number in streams:
            rig.core.abort(number)
    return found
