"""Drafts are made only where they pay, on the clock of a simulated machine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.drafting.adaptive_drafter import AdaptiveDrafter
from inflight.engine.drafting.draft_cost import DraftPrices
from inflight.engine.drafting.drafter import Guess
from inflight.engine.drafting.lookup_drafter import LookupGuesser
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams
from inflight.speculative import SpeculativeConfig

Machine = Callable[[int, int], float]  # sequences, draft tokens -> seconds


def reads_weights(num_sequences: int, num_drafts: int) -> float:
    """A step takes as long as reading the weights, and a little for each token."""
    return 0.01 + 0.0001 * (num_sequences + num_drafts)


def computes(num_sequences: int, num_drafts: int) -> float:
    """Every token costs the same: a device that is busy."""
    return 0.001 * (num_sequences + num_drafts)


@given(
    st.integers(1, 64),
    st.floats(1e-4, 1.0),
    st.floats(0.0, 1.0),
    st.lists(st.integers(0, 30), min_size=60, max_size=120),
    st.integers(0, 2**20),
)
def test_the_price_is_the_cost_of_a_draft_token(
    num_sequences: int, base: float, cost: float, drafts: list[int], seed: int
) -> None:
    """In tokens that the engine emits in that time, on any machine; up to noise, and outliers are cut."""
    rng = random.Random(seed)
    prices = DraftPrices()
    accepted_share = rng.random()
    emitted = seconds = 0.0
    for number, count in enumerate([*drafts, *[0, 30] * 20]):
        took = base * (1 + cost * count) * rng.uniform(0.99, 1.01)
        accepted = int(count * accepted_share)
        prices.observe(num_sequences, count, accepted, took * (40 if number == len(drafts) + 7 else 1))
        if number >= len(drafts):
            emitted += num_sequences + accepted
            seconds += took
    prices.begin(num_sequences)
    assert prices.price == pytest.approx(1.25 * base * cost * emitted / seconds, rel=0.25, abs=0.02 * num_sequences)


def test_little_is_risked_before_anything_is_known() -> None:
    prices = DraftPrices()
    assert prices.price == float("inf") and not prices.room
    prices.begin(0)
    assert not prices.room, "no request runs"
    prices.begin(1)
    assert prices.price == pytest.approx(0.125)
    prices.begin(100)
    assert prices.price == pytest.approx(1.25), "in a full batch drafts are not expected to pay"


def test_drafts_leave_a_step_within_its_target() -> None:
    prices = DraftPrices(target=0.02)
    for count in [0, 10] * 50:
        prices.observe(4, count, 0, 0.01 + 0.001 * count)
    prices.begin(4)
    assert prices.room == pytest.approx(10, abs=1)
    late = DraftPrices(target=0.005)
    for count in [0, 10] * 50:
        late.observe(4, count, 0, 0.01 + 0.001 * count)
    late.begin(4)
    assert late.room == 0


def text(kind: str, number: int) -> list[int]:
    rng = random.Random(number)
    if kind == "copies":
        piece = [rng.randrange(10_000) for _ in range(150)]
        return piece * 100
    return [rng.randrange(30) for _ in range(6000)]  # pairs recur only by accident


def serve(
    texts: list[list[int]], machine: Machine, steps: int, drafter: AdaptiveDrafter | None
) -> tuple[float, int, list[int]]:
    """Decode so many sequences together; seconds, tokens, and the draft tokens of each step."""
    requests = [Request(n, text[:200], SamplingParams(max_tokens=5000)) for n, text in enumerate(texts)]
    seconds, emitted, drafted = 0.0, 0, []
    for _ in range(steps):
        proposals: list[list[int]] = [[] for _ in requests]
        if drafter is not None:
            drafter.step_begins(requests)
            if drafter.active:
                proposals = [list(drafter.propose(request, 0, 64)) for request in requests]
        for request, drafts, whole in zip(requests, proposals, texts):
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == whole[request.num_tokens + accepted]:
                accepted += 1
            request.token_ids.extend(whole[request.num_tokens : request.num_tokens + accepted + 1])
            request.num_tokens = len(request.token_ids)
            emitted += accepted + 1
            if drafts and drafter is not None:
                drafter.observe(request, len(drafts), accepted)
        drafted.append(sum(map(len, proposals)))
        took = machine(len(requests), drafted[-1])
        seconds += took
        if drafter is not None:
            drafter.step_took(len(requests), drafted[-1], took)
    return seconds, emitted, drafted


def make_drafter() -> AdaptiveDrafter:
    return AdaptiveDrafter(LookupGuesser(SpeculativeConfig(method="suffix")), 24, clock=lambda: 0.0)


def gain(kind: str, count: int, machine: Machine, steps: int = 100) -> tuple[float, list[int]]:
    """Tokens per second with drafts, relative to those without."""
    texts = [text(kind, number) for number in range(count)]
    drafter = make_drafter()
    seconds, emitted, drafted = serve(texts, machine, steps, drafter)
    plain_seconds, plain_emitted, _ = serve(texts, machine, steps, None)
    return emitted / seconds * plain_seconds / plain_emitted, drafted


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_copies_are_drafted_while_a_token_is_still_unknown(method: str) -> None:
    """As where steps are launched ahead: the row sits out a step, and the first token of the guess is no draft."""
    drafter = AdaptiveDrafter(LookupGuesser(SpeculativeConfig(method=method)), 8, clock=lambda: 0.0)
    copied = Request(0, text("copies", 1)[:250], SamplingParams(max_tokens=50))
    copied.token_ids.extend(copied.token_ids[100:101])
    copied.num_tokens += 1
    drafter.step_begins([copied])
    assert drafter.propose(copied, 1, 8) == text("copies", 1)[102:110]


def test_text_that_is_copied_comes_several_times_as_fast() -> None:
    assert gain("copies", 1, reads_weights)[0] > 6
    assert gain("copies", 8, reads_weights)[0] > 4


@pytest.mark.parametrize("count", [1, 4, 32])
@pytest.mark.parametrize("machine", [reads_weights, computes])
@pytest.mark.parametrize("kind", ["copies", "accidents"])
def test_drafts_cost_nothing_where_they_gain_nothing(kind: str, count: int, machine: Machine) -> None:
    """In simulated time, where looking them up is free."""
    assert gain(kind, count, machine, 400 if kind == "accidents" else 100)[0] > 0.98


def test_nothing_is_drafted_where_every_token_costs_the_same_but_a_probe() -> None:
    drafted = gain("copies", 16, computes, 300)[1]
    assert sum(count > 0 for count in drafted[100:]) <= 3
    assert sum(drafted[100:]) > 0, "the machine may have changed"


def test_a_machine_that_becomes_free_gets_drafts_again() -> None:
    texts = [text("copies", number) for number in range(4)]
    drafter = make_drafter()
    serve(texts, computes, 300, drafter)
    _, _, drafted = serve([text("copies", number) for number in range(20, 24)], reads_weights, 500, drafter)
    assert sum(drafted[-50:]) > 50


def test_a_sequence_whose_text_begins_to_repeat_gets_drafts_again() -> None:
    whole = text("accidents", 1)[:1200] + text("copies", 1)
    drafter = make_drafter()
    _, _, drafted = serve([whole], lambda num_sequences, count: 0.01 + 0.001 * count, 1300, drafter)
    assert sum(drafted[600:900]) < 30, "it has learned that drafts do not pay"
    assert sum(drafted[-40:]) > 200


def test_without_accepted_drafts_most_steps_skip_the_lookup_until_the_text_repeats() -> None:
    def slow_clock() -> float:
        nonlocal now
        now += 0.0005  # a twentieth of a step
        return now

    now = 0.0
    drafter = AdaptiveDrafter(LookupGuesser(SpeculativeConfig(method="suffix")), 24, clock=slow_clock)
    fresh = list(range(30_000, 30_600))  # no token comes twice
    active = []
    begin = drafter.step_begins
    drafter.step_begins = lambda running: (begin(running), active.append(drafter.active))  # type: ignore[method-assign,assignment]
    _, _, drafted = serve([fresh + text("copies", 1)], lambda num_sequences, count: 0.01 + 0.001 * count, 700, drafter)
    assert sum(active[100:400]) < 300 / 6, "a rest is at most 7 of 8 steps"
    began = next(step for step, count in enumerate(drafted) if count)
    assert began < 600 - 200 + 150 + 64, "it repeats, and the longest pause is over"
    assert all(active[began + 24 :]) and sum(drafted[began + 24 :]) > 200


class WrongModel:
    """A guesser that computes, and is never right."""

    computes = True

    def __init__(self) -> None:
        self._wanted: dict[Request, int] = {}

    def begin(self, running: Sequence[Request], hope: Callable[[Request], int]) -> None:
        self._wanted = {request: count for request in running if (count := hope(request))}

    def guess(self, request: Request, limit: int) -> Guess | None:
        count = min(limit, self._wanted.get(request, 0))
        return Guess([-1] * count, [1.0] * count, 0) if count else None

    def ended(self, request: Request) -> None:
        pass


@pytest.mark.parametrize("busy_from", [0, 30, 60, 100])  # step
@pytest.mark.parametrize("seconds_a_token", [0.002, 0.02])  # for a step of 10 ms: it may pay, and it cannot
def test_a_model_is_tried_in_time_even_if_a_lookup_seems_to_take_long(seconds_a_token: float, busy_from: int) -> None:
    """A model that was not run has done no work that a pause would save."""

    def clock() -> float:
        nonlocal now
        now += 0.05 * (steps >= busy_from)
        return now

    def machine(num_sequences: int, num_drafts: int) -> float:
        nonlocal steps
        steps += 1
        return 0.01 + seconds_a_token * num_drafts

    now, steps = 0.0, 0
    _, _, drafted = serve([list(range(3000))], machine, 1000, AdaptiveDrafter(WrongModel(), 24, clock=clock))
    tried = [0, *(step for step, count in enumerate(drafted) if count), len(drafted)]
    assert max(late - early for early, late in itertools.pairwise(tried)) <= 130


def test_a_model_that_fails_is_run_seldom() -> None:
    """Each run can compute a whole prompt for nothing."""

    class FailingModel(WrongModel):
        num_asked = 0

        def guess(self, request: Request, limit: int) -> None:
            self.num_asked += request in self._wanted

    model = FailingModel()
    now = itertools.count(step=0.05)  # five steps
    drafter = AdaptiveDrafter(model, 24, clock=lambda: next(now))
    serve([list(range(3000))], lambda num_sequences, num_drafts: 0.01, 1000, drafter)
    assert 1000 / 128 <= model.num_asked <= 1000 / 32


def test_a_draft_after_a_token_that_is_still_unknown_must_be_worth_a_step() -> None:
    drafter = make_drafter()
    period = list(range(1, 30))
    sure = Request(1, period * 2, SamplingParams(max_tokens=900), period)
    drafter.step_begins([sure])
    assert list(drafter.propose(sure, 1, 8)) == period[1:9]
    unsure = Request(2, [1, 2, 3, 4, 9, 1], SamplingParams(max_tokens=900), [2])
    assert drafter.propose(unsure, 0, 8), "its chances are fair"
    assert not drafter.propose(unsure, 1, 8)
    assert not drafter.propose(Request(3, period * 3, SamplingParams()), 0, 8), "it has no output yet"


def test_made_up_tenants_and_ended_requests_are_forgotten() -> None:
    drafter = make_drafter()
    for number in range(1100):
        request = Request(number, [1, 2, 3, 1, 2, 3, 1], SamplingParams(max_tokens=9), [2], tenant=str(number))
        drafter.step_begins([request])
        assert drafter.propose(request, 0, 2)
        drafter.observe(request, 2, 1)
        drafter.ended(request)
    assert len(drafter._tenants) == 1000 and "1099" in drafter._tenants
    assert not drafter._sequences and not drafter._guesser._own


def test_a_clock_that_does_not_advance_breaks_nothing() -> None:
    prices = DraftPrices()
    for num_drafts in (0, 3, 0, 5):
        prices.begin(4)
        prices.observe(4, num_drafts, num_drafts, 0.0)
    prices.begin(4)
    assert prices.price < 1.0 and prices.room
