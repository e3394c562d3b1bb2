"""Which requests are replayed after deaths, against engines that simulated poison kills."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.frontend.engine_client.poison_search import PoisonSearch, _parts

MAX_REPLAYS = 2


@dataclass
class Job:
    """A request that kills the engine as it computes output token `kills_at` (None: never)."""

    length: int
    kills_at: int | None = None
    sequences: int = 1
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [0] * self.sequences


class World:
    """Requests, an engine with `slots` places, and the causes of its deaths.

    Attributes:
        deaths: of engines.
        failed: requests that were given up.
        dry: of each request, the most deaths in a row without a token for it.
        tried: the requests that the engine was emptied for.
    """

    def __init__(self, jobs: list[Job], slots: int = 64, max_replays: int = MAX_REPLAYS, patience: int = 9) -> None:
        self.jobs = dict(enumerate(jobs))
        self.slots = slots
        self.search = PoisonSearch(max_replays)
        self.new: list[int] = list(self.jobs)
        self.engine: list[int] = []
        self.failed: list[int] = []
        self.done: list[int] = []
        self.deaths = 0
        self.dry: Counter[int] = Counter()
        self.tried: list[int] = []
        self._dry_now: Counter[int] = Counter()
        self._served: set[int] = set()
        self._patience = self._left = patience  # steps that suspects wait for the others' tokens
        self._emptying = 0  # steps until the engine has confirmed that it is empty

    def add(self, job: Job) -> int:
        number = len(self.jobs)
        self.jobs[number] = job
        self.new.append(number)
        return number

    def feed(self) -> None:
        if self._emptying:
            return
        self.engine += self.search.due(self.may_risk)
        assert len(set(self.engine)) == len(self.engine), "given twice"
        if self.search.trial is not None and self.may_risk:
            self.tried.append(self.search.trial)
            self.search.begin_trial(self.engine)
            self._emptying, self._left, self._served = 2, self._patience, set()
        if not self.search.holds_new:
            self.engine += self.new
            self.new = []

    @property
    def may_risk(self) -> bool:
        return self.search.is_risky and (not self._left or self._served.issuperset(self.engine))

    def running(self) -> dict[int, set[int]]:
        """The sequences in the slots, first come, first served."""
        found: dict[int, set[int]] = {}
        places = self.slots
        for number in self.engine:
            job = self.jobs[number]
            for index in range(job.sequences):
                if places and job.tokens[index] < job.length:
                    found.setdefault(number, set()).add(index)
                    places -= 1
        return found

    def step(self) -> None:
        """One step, or one death."""
        self.feed()
        ran = self.running()
        if any(self.jobs[k].tokens[i] == self.jobs[k].kills_at for k, indices in ran.items() for i in indices):
            self.die(ran)
            return
        for number, indices in ran.items():
            for index in sorted(indices):
                self.jobs[number].tokens[index] += 1
                self.search.got_token(number, index)
            self._dry_now[number] = 0
            self._served.add(number)
        self._left -= self.search.is_risky and self._left > 0
        if self._emptying:
            self._emptying -= 1
            self.engine = self.engine if self._emptying else []
        for number in list(self.engine):
            if all(count == self.jobs[number].length for count in self.jobs[number].tokens):
                self.end(number)

    def die(self, ran: dict[int, set[int]]) -> None:
        self.deaths += 1
        had, self.engine = self.engine, []
        self._emptying, self._left, self._served = 0, self._patience, set()
        self._dry_now.update(self.jobs.keys() - set(self.done))
        self.dry |= self._dry_now
        for number, deaths in self.search.engine_down(had, ran).items():
            assert deaths > self.search._max_replays
            self.failed.append(number)
            self.search.ended(number)

    def end(self, number: int) -> None:
        self.engine.remove(number)
        self.done.append(number)
        self.search.ended(number)

    def run(self, limit: int = 100_000) -> None:
        while len(self.failed) + len(self.done) < len(self.jobs):
            self.step()
            limit -= 1
            assert limit, "does not end"
        assert not self.search.active
        assert not (self.search._points or self.search._deaths or self.search._groups)

    @property
    def poison(self) -> list[int]:
        return [number for number, job in self.jobs.items() if job.kills_at is not None and job.kills_at < job.length]


def most_deaths(n: int, num_poison: int) -> int:
    """The bound in the module's docstring, with two more deaths for each that shows beside another."""
    return num_poison * (math.ceil(math.log(max(n, 2), 8)) + MAX_REPLAYS + 2)


jobs = st.lists(
    st.builds(
        Job,
        length=st.integers(1, 12),
        kills_at=st.one_of(st.none(), st.none(), st.integers(0, 11)),
        sequences=st.integers(1, 3),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(jobs=jobs, slots=st.integers(1, 64))
def test_every_poison_fails_and_everyone_else_completes(jobs: list[Job], slots: int) -> None:
    world = World([Job(job.length, job.kills_at, job.sequences) for job in jobs], slots)
    world.run()
    assert sorted(world.failed) == world.poison
    assert world.deaths <= most_deaths(len(jobs), len(world.poison))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 130), data=st.data())
def test_one_poison_is_found_in_the_logarithm_of_the_requests(n: int, data: st.DataObject) -> None:
    """At any place among the requests, and at any token; only an eighth of the others waits for long."""
    guilty = data.draw(st.integers(0, n - 1))
    kills_at = data.draw(st.integers(0, 5))
    world = World([Job(6, kills_at if k == guilty else None) for k in range(n)], slots=n)
    world.run()
    assert world.failed == [guilty]
    levels = sum(n > 8**level for level in range(5))
    assert world.deaths <= max(MAX_REPLAYS + 2, levels + 2)
    waited = [number for number, deaths in world.dry.items() if deaths > 2 and number != guilty]
    assert len(waited) < math.ceil(n / 8), "the others had a token from each second engine"


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 130), data=st.data())
def test_nobody_who_came_long_before_the_poison_waits_for_two_engines(n: int, data: st.DataObject) -> None:
    """Those in earlier groups; if the poison is the newest, everyone."""
    guilty = n - 1 if data.draw(st.booleans()) else data.draw(st.integers(0, n - 1))
    world = World([Job(60, data.draw(st.integers(0, 5)) if k == guilty else None) for k in range(n)], slots=n)
    world.run()
    assert world.failed == [guilty]
    assert world.tried == [guilty] or world.tried == []
    group = next(group for group in _parts(list(range(n))) if guilty in group)
    waited = [number for number, deaths in world.dry.items() if deaths > 1 and number != guilty]
    assert not [number for number in waited if number < group[0]]
    if guilty == n - 1:
        assert not waited


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_kills_from_outside_fail_no_request_that_gets_any_further(data: st.DataObject) -> None:
    """Each engine lives long enough for a token of each running request; new requests run, too."""
    world = World([Job(data.draw(st.integers(1, 30)), sequences=data.draw(st.integers(1, 2))) for _ in range(12)])
    for _ in range(data.draw(st.integers(0, 20))):
        for _ in range(data.draw(st.integers(0, 6))):
            world.step()
        if data.draw(st.booleans()):
            world.add(Job(5))
        world.feed()
        if world.search._probe and len(world.running()) == 1:
            world.step()
        if ran := world.running():
            world.die(ran)
    world.run()
    assert world.failed == []


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_suspects_that_end_by_themselves_delay_no_other_request(data: st.DataObject) -> None:
    world = World([Job(20) for _ in range(12)])
    world.step()
    for _ in range(data.draw(st.integers(1, 2))):
        world.die(world.running())
        for number in data.draw(st.lists(st.sampled_from(sorted(world.jobs)), unique=True)):
            if number not in world.done:
                world.done.append(number)
                world.engine = [other for other in world.engine if other != number]
                world.search.ended(number)
        world.feed()
        if not world.running():
            break
    world.run()
    assert world.failed == []


def test_new_requests_run_beside_a_group_under_suspicion_but_not_beside_a_single_one() -> None:
    search = PoisonSearch(MAX_REPLAYS)
    assert search.engine_down(range(6), {k: {0} for k in range(4)}) == {}
    assert search.due(False) == [0, 4, 5], "an eighth of the suspects, and the others"
    assert not search.holds_new
    search.engine_down([0, 4, 5, 6], {k: {0} for k in (0, 6)})
    assert search.due(False) == [6, 4, 5], "first the ones that ran beside it"
    search.got_token(6, 0)
    for k in range(1, 4):
        assert search.due(False) == [k]
        search.got_token(k, 0)
    assert search.due(False) == [], "it may kill this engine, too"
    assert search.is_risky and search.trial is None
    assert search.due(True) == [0]
    assert not search.holds_new
    search.engine_down(range(7), {k: {0} for k in range(7)})
    assert search.due(False) == [1, 2, 3, 4, 5, 6]
    assert search.trial is None, "others come first"
    for k in range(1, 7):
        search.got_token(k, 0)
    assert search.due(True) == []
    assert search.trial == 0, "it was the only one in question, for the third time"
    search.begin_trial(range(1, 7))
    assert (search.trial, search.holds_new) == (None, True)
    assert search.due(False) == [0], "alone"
    assert search.due(True) == []
    assert search.engine_down([0], {0: {0}}) == {0: 4}
    assert not search.holds_new
    assert search.due(False) == [1, 2, 3, 4, 5, 6]
    assert search.due(False) == []
    assert not search.active


def on_trial() -> PoisonSearch:
    """Request 3 has ended three engines, each time after 1 and 2 got a token; 4 waited for a slot.  1, 2 and 4 run."""
    search = PoisonSearch(MAX_REPLAYS)
    for _ in range(3):
        search.engine_down([1, 2, 3, 4], {k: {0} for k in (1, 2, 3)})
        while group := search.due(True):
            for k in {1, 2}.intersection(group):
                search.got_token(k, 0)
    assert search.trial == 3
    return search


def test_a_suspect_that_survives_its_trial_goes_on_like_the_others() -> None:
    search = on_trial()
    search.begin_trial([1, 2, 4])
    assert search.due(False) == [3]
    search.got_token(3, 0)
    assert not search.holds_new
    assert search.due(False) == [1, 2, 4]
    assert not search.active


def test_an_engine_that_dies_while_it_is_emptied_counts_for_those_that_ran_and_the_trial_follows() -> None:
    search = on_trial()
    search.begin_trial([1, 2, 4])
    assert search.engine_down([1, 2, 4], {1: {0}, 2: {0}}) == {}
    assert not search.holds_new
    order = [search.due(True)]
    search.got_token(1, 0)
    order.append(search.due(True))
    search.got_token(2, 0)
    assert order == [[1, 4], [2]]
    assert search.trial == 3


def test_a_death_before_the_suspect_ran_does_not_count_for_it() -> None:
    search = on_trial()
    search.begin_trial([1, 2, 4])
    assert search.due(False) == [3]
    assert search.engine_down([3], {}) == {}
    assert search.due(False) == [1, 2, 4], "the others first"
    assert search.trial == 3


def test_a_suspect_that_ends_while_the_engine_is_emptied_lets_the_others_return() -> None:
    search = on_trial()
    search.begin_trial([1, 2, 4])
    search.ended(3)
    search.ended(1)
    assert not search.holds_new
    assert search.due(False) == [2, 4]
    assert not search.active


def test_two_suspects_are_tried_one_after_the_other_and_the_others_run_in_between() -> None:
    search = PoisonSearch(MAX_REPLAYS)
    search._trials, search._risky = {1, 2}, {1, 2}
    search._groups.extend([[1], [2]])
    search._points, search._deaths = {1: {0}, 2: {0}}, Counter({1: 3, 2: 3})
    assert search.trial == 1
    search.begin_trial([5])
    assert search.due(False) == [1]
    assert search.engine_down([1], {1: {0}}) == {1: 4}
    assert search.due(True) == [5]
    assert search.trial == 2
    search.begin_trial([5])
    assert search.due(False) == [2]


def test_a_parked_request_returns_once_after_the_trial() -> None:
    search = on_trial()
    search.begin_trial([1, 2])
    for k in (4, 4, 1, 3):
        search.park(k)
    assert search.due(False) == [3]
    search.got_token(3, 0)
    assert search.due(False) == [1, 2, 4]


def test_a_group_that_dies_is_divided_and_comes_last() -> None:
    search = PoisonSearch(MAX_REPLAYS)
    search.engine_down(range(24), {k: {0} for k in range(24)})
    assert search.due(False) == [0, 1, 2]
    for k in range(3):
        search.got_token(k, 0)
    assert search.due(False) == [3, 4, 5]
    search.engine_down(range(6), {k: {0} for k in range(6)})
    order = []
    while group := search.due(True):
        order.append(group)
        for k in group:
            search.got_token(k, 0)
    assert order == [[0, 1, 2], *([k, k + 1, k + 2] for k in range(6, 21, 3)), [21], [22], [23], [3], [4], [5]]


def test_a_request_has_got_past_the_point_once_each_of_its_sequences_has() -> None:
    search = PoisonSearch(MAX_REPLAYS)
    search.engine_down([1, 2], {1: {0, 2}, 2: {0}})
    assert search.due(False) == [1]
    search.got_token(1, 0)
    search.got_token(1, 1)
    assert search.due(False) == []
    search.got_token(1, 2)
    assert search.due(False) == [2]


def test_what_is_still_to_be_sent_is_not_given_out_again() -> None:
    """A frontend that has no turn at the engine keeps its queue when the engine dies."""
    search = PoisonSearch(MAX_REPLAYS)
    search.engine_down(range(16), {k: {0} for k in range(16)})
    assert search.due(False) == [0, 1]
    search.engine_down([0], {0: {0}})
    assert search.due(False) == [], "the second one is on its way"
    search.got_token(1, 0)
    assert search.due(False) == [2, 3]


@pytest.mark.parametrize("n", [1, 3])
def test_without_replays_whatever_ran_fails(n: int) -> None:
    search = PoisonSearch(0)
    assert search.engine_down(range(5), {k: {0} for k in range(n)}) == dict.fromkeys(range(n), 1)
    assert search.due(False) == list(range(n, 5))
