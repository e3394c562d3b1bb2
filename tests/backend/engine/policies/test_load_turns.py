"""Loads of adapters in turn and at a cost: a tenant that names adapters without end slows itself, in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading_machine import Machine

from inflight.engine.adapter import AdapterRef
from inflight.engine.integrity import check_core
from inflight.engine.policies.base import NotYet
from inflight.engine.request import Request

EACH = {"*": {"per_name": True}}


def times_of_b(machine: Machine, adapter: str, pause: float, until: float) -> list[float]:
    """Times to the first token of B's requests, one after the other."""
    ids: list[int] = []
    due = machine.now + 1.0
    while machine.now < until:
        if machine.now >= due and machine.live_of("b") == 0:
            found = machine.ask("b", adapter)
            assert found is not None
            ids.append(found)
            due = machine.now + pause
        machine.step()
    return [machine.first[number] for number in ids if number in machine.first]


@pytest.mark.parametrize("adapter", ["", "its own"])
def test_a_tenant_that_names_a_thousand_adapters_slows_itself(adapter: str) -> None:
    """B pauses for longer than an adapter in memory is safe from others, and neither waits nor loads again."""
    machine = Machine(EACH)
    for number in range(1000):
        machine.ask("a", f"a{number}")
    times = times_of_b(machine, adapter, pause=1.0, until=9.0)
    assert len(times) >= 5
    # Its first request waits for what is in the loader, and for its own load.
    assert times[0] < (3.5 * machine.load_seconds if adapter else 0.1)
    assert max(times[1:]) < 0.1
    assert machine.table.loads["its own"] == (1 if adapter else 0)
    assert len([name for name in machine.table.loads if name.startswith("a")]) > 12, "A goes on beside it"
    assert machine.table.most_pending <= 2


def test_costs_of_two_tenants_converge() -> None:
    """One causes a load with each request, the other none."""
    machine = Machine(EACH, load_seconds=0.05)
    while machine.now < 12:
        while machine.live_of("a") < 12:
            machine.ask("a", f"a{len(machine.arrived)}")
        while machine.live_of("b") < 12:
            machine.ask("b")
        machine.step()
    assert machine.charged["a"] > machine.tokens["a"] and machine.charged["b"] == 0
    assert not machine.failed
    assert 0.85 < (machine.tokens["a"] + machine.charged["a"]) / machine.tokens["b"] < 1.15


@settings(max_examples=20, deadline=None)
@given(
    weights=st.tuples(st.sampled_from([0.5, 1, 3]), st.sampled_from([0.5, 1, 3])),
    load_seconds=st.sampled_from([0.001, 0.05, 0.2]),
    kept=st.integers(1, 6),
    output=st.integers(1, 12),
    num_live=st.integers(1, 8),
    dressed=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "sjf"]),
)
def test_loads_buy_no_share_and_starve_nobody(
    weights: tuple[float, float],
    load_seconds: float,
    kept: int,
    output: int,
    num_live: int,
    dressed: bool,
    policy: str,
) -> None:
    slots, (mine, theirs) = 4, weights
    tenants = {"a": {"weight": mine}, "b": {"weight": theirs}}
    machine = Machine(tenants, load_seconds, kept, max_num_seqs=slots, scheduling_policy=policy)
    longest = 0.0
    ended: Counter[str] = Counter()
    for step in range(2400):
        if step >= 60 and min(ended["a"], ended["b"]) > 1:
            break
        while machine.live_of("a") < num_live:
            machine.ask("a", f"a{len(machine.arrived)}", output=output, n=1 + len(machine.arrived) % 2)
        while machine.live_of("b") < 10:
            machine.ask("b", "b" if dressed else "")
        machine.step()
        ended = Counter(machine.requests[number].tenant for number in machine.ended)
        longest = max(longest, 12.0, 6 + output, load_seconds * machine.turns.tokens_per_second)
    excess = (machine.tokens["a"] + machine.charged["a"]) / mine - machine.tokens["b"] / theirs
    if not dressed:  # else it can wait for a place in memory, and claims nothing meanwhile
        assert excess <= longest * ((1 + 2 * slots + 3) / mine + (1 + slots) / theirs)
    assert ended["a"] > 1 and ended["b"] > 1 and not machine.failed
    machine.run()
    assert not machine.turns._waiting and not machine.turns._loading and machine.queue._num_held == 0
    assert len(machine.ended) == len(machine.requests) and len(machine.turns._payers) <= len(machine.table.loads)


def test_a_tenant_starts_with_what_it_has_loaded_before_it_loads_the_next_one() -> None:
    """With one place in memory the next load would take that place, and the tenant would pay for nothing."""
    machine = Machine({"a": {"weight": 0.5}, "b": {"weight": 3}}, load_seconds=0.2, kept=1, max_num_seqs=4)
    while machine.now < 25.0:
        while machine.live_of("a") < 14:
            machine.ask("a", f"a{len(machine.arrived)}", n=1 + len(machine.arrived) % 2)
        while machine.live_of("b") < 10:
            machine.ask("b")
        machine.step()
    ended = Counter(machine.requests[number].tenant for number in machine.ended)
    assert sum(machine.table.loads.values()) - ended["a"] <= 2 and ended["a"] > 8


def answers_within(machine: Machine) -> dict[int, bool | NotYet]:
    """By id of a request whose adapter is loaded; of others the policy within answers as ever."""
    inner, answers = machine.admission._inner, dict[int, bool | NotYet]()

    def admits(request: Request, *rest: Any) -> bool | NotYet:
        return answers[request.request_id] if request.request_id in answers else inner.admits(request, *rest)

    machine.admission._inner = SimpleNamespace(admits=admits)  # type: ignore[assignment]
    return answers


def start_within_patience(machine: Machine, number: int) -> None:
    while number not in machine.first:
        machine.step()
        assert number not in machine.failed
    assert machine.first[number] < 2.0 + 2 * machine.load_seconds, "the patience of the table, and its load"


def test_a_request_that_waits_for_a_grammar_too_leaves_its_place_to_its_tenants_next_one() -> None:
    machine = Machine(EACH, kept=1)
    answers = answers_within(machine)
    answers[0] = NotYet("its grammar", 60.0)
    machine.ask("a", "a0")
    machine.step_until(lambda: machine.table.get("id of a0") is not None)
    machine.ask("a", "a1")
    start_within_patience(machine, 1)
    del answers[0]
    machine.run()
    assert machine.ended == {0, 1} and dict(machine.table.loads) == {"a0": 2, "a1": 1}


def test_one_that_has_its_grammar_and_lacks_blocks_keeps_the_place() -> None:
    machine = Machine(EACH, kept=1)
    answers = answers_within(machine)
    answers[0] = NotYet("its grammar", 60.0)
    machine.ask("a", "a0")
    machine.step_until(lambda: machine.now > 1.0)
    answers[0] = False
    machine.ask("a", "a1")
    machine.step_until(lambda: machine.now > 4.0)
    assert dict(machine.table.loads) == {"a0": 1}, "it would load twice"
    del answers[0]
    machine.run()
    assert machine.ended == {0, 1} and dict(machine.table.loads) == {"a0": 1, "a1": 1}


def test_one_that_has_ended_keeps_no_place_while_another_tenant_waits_with_its_adapter() -> None:
    machine = Machine(EACH, kept=1)
    answers = answers_within(machine)
    answers[0], answers[1] = False, NotYet("its grammar", 60.0)
    machine.ask("a", "a0")
    machine.ask("b", "a0")
    machine.step_until(lambda: machine.now > 1.0)
    machine.core.abort(0)
    machine.ask("a", "a2")
    start_within_patience(machine, 2)
    del answers[1]
    machine.run()
    assert machine.ended == {1, 2}


def test_only_the_first_pays_and_a_failed_load_costs_what_others_did() -> None:
    machine = Machine(EACH)
    machine.ask("c", output=20)
    machine.run()
    machine.ask("a", "shared")
    machine.ask("b", "shared")
    machine.run()
    machine.ask("b", "shared")
    machine.run()
    paid = 0.3 * machine.turns.tokens_per_second
    assert 0.5 * paid < machine.charged["a"] < 2 * paid and machine.charged["b"] == 0
    before = machine.charged["a"]
    machine.ask("a", "bad")
    machine.run()
    assert 0.5 * paid < machine.charged["a"] - before < 2 * paid
    assert [failure.message for failure in machine.failed.values()] == ["damaged"]


def test_requests_that_wait_for_loads_leave_places_to_others_and_nothing_behind() -> None:
    """The loader of one tenant's adapters never ends."""
    machine = Machine(EACH, kept=64)
    machine.ask("b", "b")
    machine.run()
    machine.load_seconds = 1e9
    flood = [machine.ask("a", f"a{number}", n=1 + number % 2) for number in range(600)]
    for tenant, adapter in [("b", "b"), ("c", ""), ("b", "b"), ("a", "")] * 5:
        machine.ask(tenant, adapter)
    for _ in range(300):
        machine.step()
    ended = Counter(machine.requests[number].tenant for number in machine.ended)
    assert (ended["b"], ended["c"]) == (11, 5)
    assert 100 < len(machine.core.scheduler.held) <= 130
    for number in flood:
        assert number is not None
        machine.core.abort(number)
    check_core(machine.core)
    machine.run()
    assert not machine.turns._waiting and machine.queue._num_held == 0 and not machine.queue._crowded
    assert Counter(machine.requests[number].tenant for number in machine.ended)["a"] == 5


def test_caps_count_requests_that_wait_for_a_load() -> None:
    machine = Machine({"a": {"max_queued": 3, "max_running": 1}}, max_num_seqs=4)
    accepted = [number for number in range(20) if machine.ask("a", f"a{number}") is not None]
    assert len(accepted) == 4, "one that may run, and three that wait"
    for _ in range(3):
        machine.step()
    assert machine.ask("a", "one more") is None
    said = machine.failed[20].message
    assert said.startswith("the queue of tenant 'a' is full: ") and "max_queued=3" in said  # the gateway reads it
    assert machine.ask("b", "b") is not None
    machine.run()
    assert len(machine.ended) == 5


def test_a_load_ahead_waits_for_a_start_of_its_tenant() -> None:
    """Another tenant is next and waits for a slot."""
    machine = Machine(EACH, load_seconds=0.01, max_num_seqs=1)
    machine.ask("b", output=40)
    machine.step()
    machine.ask("b", output=5)
    machine.ask("a", output=5)
    machine.queue.charge(machine.requests[2], 1000.0)
    for number in range(3):
        machine.ask("a", f"a{number}")
    for _ in range(20):
        machine.step()
    assert list(machine.table.loads) == ["a0"]
    machine.run()
    assert set(machine.table.loads) == {"a0", "a1", "a2"}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kept=st.integers(1, 3),
    slots=st.integers(1, 2),
    tenants=st.sampled_from([{}, EACH, {"*": {}}, {"a": {"max_running": 1}, "b": {"weight": 3}}]),
    policy=st.sampled_from(["fcfs", "priority", "sjf", "edf"]),
    num_blocks=st.sampled_from([20, 128]),
)
def test_chats_and_vectors_with_few_adapters_in_memory_all_end(
    seed: int, kept: int, slots: int, tenants: dict[str, Any], policy: str, num_blocks: int
) -> None:
    """Several sequences, priorities, preemption, aborts while an adapter is loaded, and damaged ones."""
    rng = random.Random(seed)
    machine = Machine(tenants, 0.1, kept, slots, num_blocks, max_num_seqs=4, scheduling_policy=policy)
    for _ in range(60):
        pooled = rng.random() < 0.4
        machine.ask(
            rng.choice("abc"),
            rng.choice(["", "x", "y", "z", "bad"]),
            rng.randint(1, 20),
            rng.randint(1, 12),
            n=1 if pooled else rng.randint(1, 2),
            pooled=pooled,
            priority=rng.randint(-2, 2),
        )
        if rng.random() < 0.2:
            number = rng.choice(list(machine.requests))
            if number in machine.core.live_ids:
                machine.core.abort(number)
        for _ in range(rng.randint(0, 4)):
            machine.step()
    machine.run()
    check_core(machine.core)
    assert {failure.message for failure in machine.failed.values()} <= {"damaged"}
    assert not machine.admission._open and not machine.admission._begun and not machine.admission._left
    assert not machine.table._waiting and not machine.table._promised
    if tenants:
        assert not machine.turns._waiting and machine.queue._num_held == 0 and not machine.queue._crowded


def test_without_tenants_loads_begin_on_arrival() -> None:
    machine = Machine({}, kept=4)
    for number in range(3):
        machine.ask("", f"a{number}")
    assert list(machine.table.loads) == ["a0", "a1", "a2"]
    machine.run()
    assert len(machine.ended) == 3


def test_the_operators_adapters_leave_last() -> None:
    """Of eight places, six are the operator's, and B uses them in turn; A names twenty."""
    machine = Machine(EACH, load_seconds=0.1)
    refs = [AdapterRef(f"b{number}", f"id of b{number}", "/nowhere", 4) for number in range(6)]
    for ref in refs:
        machine.table.load(ref)
    machine.now += 1.0
    machine.table.advance()
    for number in range(6):
        machine.ask("b", f"b{number}", output=2)
    machine.run()
    for number in range(20):
        machine.ask("a", f"a{number}")
    asked = 0
    while machine.core.has_work:
        if machine.now >= 1.0 + asked and not machine.live_of("b"):
            for number in range(6):
                machine.ask("b", f"b{number}", output=2)
            asked += 1
        machine.step()
    assert asked > 1 and not machine.failed
    assert {name: count for name, count in machine.table.loads.items() if name.startswith("b")} == dict.fromkeys(
        [ref.name for ref in refs], 1
    )


def test_who_does_not_ask_keeps_no_turn() -> None:
    """B's request has the smallest tag and waits for its turn; its deadline passes, and admission asks it no more."""
    machine = Machine(EACH, load_seconds=1e9)
    for name in ("c", "d"):
        machine.ask(name, f"adapter of {name}")
    machine.step()
    assert len(machine.table.loads) == 2
    machine.ask("b", "b", deadline=machine.now + 1.0)
    machine.ask("a", "a")
    machine.queue.charge(machine.requests[3], 1000.0)
    for _ in range(3):
        machine.step()
    late, other = machine.requests[2], machine.requests[3]
    assert machine.queue.goes_before(late, other) and set(machine.turns._waiting) == {late, other}
    machine.now += 2.0
    machine.step()
    machine.turns._loading.clear()  # the loader has room again
    for _ in range(3):
        machine.step()
    assert late in machine.core.scheduler.held and "a" in machine.table.loads and "b" not in machine.table.loads
