"""Arrivals that would miss their deadline by waiting: refused on arrival; late requests are never started."""

from __future__ import annotations

from typing import Any

import pytest
from drafters import Gate
from engine_rig import Info, make_core, repeating_model

from inflight.engine import assembly
from inflight.engine.core import EngineCore
from inflight.engine.deltas import RequestFailed
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.policies.load_shedding import _Pace
from inflight.engine.sampling_params import SamplingParams

# Under each, the request that arrives last is behind all waiting ones.
ORDERS: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "priority": {"scheduling_policy": "priority"},
    "sjf": {"scheduling_policy": "sjf"},
    "fair": {"tenants": {"a": {"weight": 4}, "*": {}}},
}


class Rig:
    """An engine with four slots whose steps take a second each: ten tokens take ten seconds."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.core: EngineCore = make_core(
            Info(num_blocks=256), lambda: self.now, max_num_seqs=4, enable_prefix_caching=False, **options
        )
        collect = self.core.runner.collect

        def after_a_second(ticket: Any) -> Any:
            self.now += 1.0
            return collect(ticket)

        self.core.runner.collect = after_a_second  # type: ignore[method-assign]
        self.num_requests = 0
        self.failed: list[RequestFailed] = []

    def add(self, timeout: float | None = None, tokens: int = 10, n: int = 1, **fields: Any) -> RequestFailed | None:
        self.num_requests += 1
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0, n=n)
        deadline = None if timeout is None else self.now + timeout
        return self.core.add_request(
            AddRequest(self.num_requests, [5, 6, 7], params, deadline=deadline, arrival=self.now, **fields)
        )

    def step(self) -> None:
        before = self.now
        self.failed += self.core.step().failed
        if self.now == before:  # nothing ran
            self.now += 1.0

    def until_idle(self) -> None:
        while self.core.has_work:
            self.step()
        check_core(self.core)

    def warm_up(self, tokens: int = 10) -> None:
        """Twelve requests of ten tokens, so that it knows the time of steps and the length of outputs."""
        for _ in range(12):
            assert self.add(tokens=tokens) is None
        self.until_idle()


@pytest.mark.parametrize("options", ORDERS.values(), ids=ORDERS)
def test_a_request_that_would_end_too_late_is_refused_with_the_time_to_wait(options: dict[str, Any]) -> None:
    rig = Rig(**options)
    rig.warm_up()
    for _ in range(8):
        assert rig.add(timeout=1000.0) is None
    rig.step()  # four run until second 10, four from then until 20: a ninth ends at 30
    late = rig.add(timeout=20.0)
    assert late is not None and (late.code, late.shed) == ("UNAVAILABLE", True)
    assert late.retry_after == pytest.approx(9.0, abs=3.0)
    assert "would end in about" in late.message
    assert rig.add(timeout=40.0) is None
    before = rig.core.pool.num_used
    rig.until_idle()
    assert not rig.failed and before


def test_drafts_yield_several_tokens_in_a_step() -> None:
    """Four slots, and steps of a second each, in which a text that repeats itself gains more than a token."""
    with repeating_model():
        rig = Rig(speculative_config={"method": "suffix"})
        rig.warm_up(tokens=60)
        before = rig.now
        for _ in range(8):
            assert rig.add(timeout=1000.0, tokens=60) is None
        rig.until_idle()
        seconds = rig.now - before
        assert seconds < 90, "without drafts it takes 120"
        for _ in range(8):
            assert rig.add(timeout=1000.0, tokens=60) is None
        rig.step()
        late = rig.add(timeout=0.75 * seconds, tokens=60)
        assert late is not None and late.shed
        assert rig.add(timeout=2.0 * seconds, tokens=60) is None, "it ends after half as long again as the eight"
        rig.until_idle()
    assert not rig.failed


def test_the_more_urgent_is_judged_by_the_requests_ahead_of_it() -> None:
    for options, urgent in (
        ({"scheduling_policy": "priority"}, {"priority": -5}),
        ({"tenants": {"a": {"weight": 100}, "*": {}}}, {"tenant": "a"}),
        ({"scheduling_policy": "edf"}, {}),
    ):
        rig = Rig(**options)
        rig.warm_up()
        for _ in range(40):
            assert rig.add(timeout=1000.0) is None
        rig.step()
        if "scheduling_policy" not in options or options["scheduling_policy"] != "edf":
            assert rig.add(timeout=60.0) is not None, f"{options}: it is behind all"
        assert rig.add(timeout=60.0, **urgent) is None, f"{options}: almost no request is ahead of it"


def test_no_request_is_refused_that_can_start_at_once_or_before_anything_is_known() -> None:
    rig = Rig()
    for _ in range(100):  # a burst at the start
        assert rig.add(timeout=0.001) is None
    rig.until_idle()
    rig = Rig()
    rig.warm_up()
    for _ in range(4):
        assert rig.add(timeout=0.001) is None, "there are four free slots, hopeless as it is"
    assert rig.add(timeout=0.001) is not None


def test_without_a_deadline_or_with_the_option_off_only_the_queue_limits() -> None:
    for options, timeout in (({}, None), ({"shed_on_predicted_wait": False}, 1.0)):
        rig = Rig(max_queue_size=20, **options)
        rig.warm_up()
        for _ in range(24):
            assert rig.add(timeout=timeout) is None
        full = rig.add(timeout=timeout)
        assert full is not None and not full.shed and "the queue is full" in full.message
        assert full.retry_after == pytest.approx(10 / 4, abs=0.5), "a slot is free every 2.5 s"


def test_the_sequences_of_a_request_and_of_those_ahead_count_one_by_one() -> None:
    rig = Rig()
    rig.warm_up()
    assert rig.add(timeout=1000.0, n=8) is None
    assert rig.add(timeout=25.0) is not None, "eight sequences take twenty seconds"
    assert rig.add(timeout=50.0) is None
    alone = Rig()
    alone.warm_up()
    assert alone.add(timeout=15.0, n=8) is not None, "its last four start after ten seconds"
    assert alone.add(timeout=30.0, n=8) is None


def test_a_tenants_cap_is_what_it_waits_for() -> None:
    rig = Rig(tenants={"small": {"max_running": 1}, "*": {}})
    rig.warm_up()
    for _ in range(3):
        assert rig.add(timeout=1000.0, tenant="small") is None
    rig.step()
    assert rig.add(timeout=25.0, tenant="small") is not None, "one at a time, and three are ahead"
    assert rig.add(timeout=25.0, tenant="other") is None, "three slots are free"


def test_requests_that_will_be_given_up_do_not_count_in_full() -> None:
    rig = Rig()
    rig.warm_up()
    for _ in range(40):
        rig.core.add_request(
            AddRequest(1000 + rig.num_requests, [5], SamplingParams(max_tokens=10, seed=0), deadline=rig.now + 3.0)
        )
        rig.num_requests += 1
    rig.step()
    assert rig.add(timeout=25.0) is None, "in three seconds all requests ahead have ended"


def test_a_request_that_brings_output_is_never_shed() -> None:
    rig = Rig()
    rig.warm_up()
    for _ in range(40):
        rig.add()
    assert rig.add(timeout=15.0) is not None
    assert rig.add(timeout=15.0, output_token_ids=[[8, 9]]) is None


def test_a_request_that_is_late_is_not_started_and_lets_others_pass() -> None:
    rig = Rig(shed_on_predicted_wait=False)
    for _ in range(4):
        assert rig.add() is None
    assert rig.add(timeout=5.0) is None  # number 5 waits until second 10
    assert rig.add() is None
    computed = 0
    for _ in range(11):
        rig.step()
    running = {request.request_id for request in rig.core.scheduler.running}
    assert running == {6} and not computed, "5 was passed over, 6 was not"
    rig.until_idle()
    assert [failed.request_id for failed in rig.failed] == [5], "no client aborted it, so the engine did"


def test_a_limit_that_names_share_is_what_each_of_them_waits_for() -> None:
    """Names that clients make up have one account, so a second name waits for the first one's request."""
    rig = Rig(tenants={"*": {"max_running": 1}})
    rig.warm_up()
    assert rig.add(tenant="one") is None
    rig.step()
    failure = rig.add(timeout=12.0, tenant="another")
    assert failure is not None and failure.shed, "three slots are free, and none of them for this account"
    assert rig.add(timeout=30.0, tenant="another") is None


def test_a_policy_can_wrap_the_one_that_knows_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(*args: Any) -> Any:
        policies = make_policies(*args)
        policies.admission = Gate(policies.admission, {})
        return policies

    make_policies = assembly.make_policies
    monkeypatch.setattr(assembly, "make_policies", gated)
    rig = Rig()
    rig.warm_up()
    for _ in range(8):
        assert rig.add(timeout=1000.0) is None
    rig.step()
    failure = rig.add(timeout=12.0)
    assert failure is not None and failure.shed


def test_an_aborted_request_does_not_make_outputs_look_shorter() -> None:
    rig = Rig()
    rig.warm_up()
    for _ in range(60):  # of ten tokens each, given up after two
        assert rig.add() is None
        rig.step()
        rig.step()
        rig.core.abort(rig.num_requests)
    assert rig.core.shedding._lengths.mean(1000) == pytest.approx(10.0)


def test_the_price_of_a_prompt_token_is_separated_from_that_of_a_step() -> None:
    pace = _Pace()
    for k in range(300):
        prompt = (0, 100, 400)[k % 3]
        pace.observe(prompt, 0.01 + 0.0001 * prompt)
    assert pace.per_prompt_token == pytest.approx(0.0001, rel=0.01)
    assert pace.per_token_alone == pytest.approx(0.01, rel=0.02)
    steady = _Pace()
    for _ in range(50):
        steady.observe(0, 0.02)
    assert (steady.per_prompt_token, steady.per_token_alone) == (0.0, pytest.approx(0.02))
