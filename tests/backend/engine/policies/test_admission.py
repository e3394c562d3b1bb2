"""Admission: the watermark, the predicted peak, and a burst that causes no preemption storm."""

from __future__ import annotations

import random

import pytest
from engine_rig import Info, add, collect, expected_output, make_core, run_until_idle
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.kv_pool import KVPool
from inflight.engine.messages import AddRequest
from inflight.engine.policies.base import AdmissionPolicy
from inflight.engine.policies.defaults import FreeBlocksAdmission
from inflight.engine.policies.memory_admission import Forecast, OutputLengths, PredictedPeakAdmission
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams


def request(prompt: int, output: int = 0, *, max_tokens: int = 1000, request_id: int = 1) -> Request:
    result = Request(request_id, [1] * prompt, SamplingParams(max_tokens=max_tokens), caches_blocks=False)
    result.token_ids.extend([2] * output)
    result.num_tokens = result.num_total_tokens = prompt + output
    return result


def run_one(pool: KVPool, *arguments, **options) -> Request:
    result = request(*arguments, **options)
    pool.admit(result, [])
    assert pool.extend(result, result.num_tokens) is not None
    return result


def run(admission: AdmissionPolicy, pool: KVPool, *arguments, **options) -> Request:
    result = run_one(pool, *arguments, **options)
    admission.admitted(result, 0)
    return result


def test_the_watermark_is_reserved_for_running_requests():
    pool = KVPool(100, 4)
    admission = FreeBlocksAdmission(0.1)
    runs = run_one(pool, 4 * 80)
    assert admission.admits(request(4 * 10 - 1), [], [runs], pool), "it takes 10 blocks, and 10 stay free"
    assert not admission.admits(request(4 * 10), [], [runs], pool)


def test_the_watermark_does_not_keep_out_a_request_that_would_run_alone():
    pool = KVPool(10, 4)
    for admission in (FreeBlocksAdmission(0.5), PredictedPeakAdmission(0.5)):
        assert admission.admits(request(39), [], [], pool)
        assert not admission.admits(request(40), [], [], pool)


def test_output_lengths_are_predicted_from_ended_requests():
    lengths = OutputLengths()
    for length in range(1, 101):
        lengths.add(length)
    fresh = [lengths.expected(request(5, request_id=i)) for i in range(1000)]
    assert sum(fresh) / len(fresh) == pytest.approx(52, abs=1), "their mean, plus 1% for the guess of 256"
    old = [lengths.expected(request(5, 80, request_id=i)) for i in range(1000)]
    assert min(old) == 81, "shorter outputs no longer count"
    assert lengths.expected(request(5, 300)) == 600, "longer than all: twice its length"
    assert lengths.expected(request(5, 300, max_tokens=400)) == 400


def test_the_first_prediction_is_a_guess_and_old_outputs_are_forgotten():
    lengths = OutputLengths(window=10)
    assert lengths.expected(request(5)) == 256
    assert lengths.expected(request(5, max_tokens=30)) == 30
    for length in [500] * 10 + [7] * 10:
        lengths.add(length)
    assert sorted({lengths.expected(request(5, request_id=i)) for i in range(100)}) == [7, 256]


@pytest.mark.parametrize(("prompt", "max_tokens", "peak"), [(4, 12, 71), (40, 4, 83)])
def test_the_peak_is_reached_just_before_an_end(prompt, max_tokens, peak):
    """Blocks of one token.  A holds 10 and ends in 12 steps, B holds 20 and ends in 40.

    C takes 5 and ends in 12 steps: the peak is 10 + 20 + 5 + 3 * 12.  Or it takes 41 and ends in four
    steps: 10 + 20 + 41 + 3 * 4.
    """
    for there in (peak, peak - 1):
        pool = KVPool(there, 1)
        admission = PredictedPeakAdmission(margin=0)
        running = [run(admission, pool, 9, max_tokens=12), run(admission, pool, 19, max_tokens=40)]
        new = request(prompt, max_tokens=max_tokens)
        assert admission.admits(new, [], running, pool) is (there == peak)


growths = st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 60)), max_size=12)


@given(growths, growths, st.integers(0, 60), st.floats(0, 9))
def test_the_forecast_is_the_sum_of_its_requests(stay, leave, step, extra):
    """Compared with the sums at every step; `final_tokens` admits no request that the peak would keep out."""
    forecast, alive = Forecast(), {}
    for number, (tokens, end) in enumerate([*stay, *leave]):
        each = request(1, request_id=number)
        alive[each] = (abs(tokens), end)  # tokens are never negative
        forecast.add(each, alive[each])
    for each in list(alive)[len(stay) :]:
        forecast.remove(each)
        del alive[each]
    assert set(forecast.pop_ending(step)) == {each for each, (_, end) in alive.items() if end == step}
    alive = {each: growth for each, growth in alive.items() if growth[1] != step}
    assert len(forecast) == len(alive)
    held = [sum(offset + t + extra for offset, end in alive.values() if end >= t) for t in range(61)]
    for each in (forecast, forecast.of(alive)):
        assert each.peak(extra) == pytest.approx(max(held))
        assert each.peak(extra) <= each.final_tokens + extra * len(alive) + 1e-6


def test_the_peak_is_not_computed_where_everything_fits(monkeypatch):
    pool = KVPool(200, 4)
    admission = PredictedPeakAdmission()
    running = [run(admission, pool, 8, max_tokens=200, request_id=i) for i in range(2)]
    monkeypatch.setattr(Forecast, "peak", None)
    assert admission.admits(request(8, max_tokens=200, request_id=3), [], running, pool), "3 * 53 blocks"


def test_a_request_that_outlives_its_prediction_gets_a_longer_one():
    pool = KVPool(100, 4)
    admission = PredictedPeakAdmission(margin=0)
    for _ in range(300):
        admission.ended(request(8, 20))
    running = [run(admission, pool, 8, max_tokens=400, request_id=0)]
    late = request(8, max_tokens=20, request_id=3)
    for step in range(24):
        assert admission.admits(late, [], running, pool), step
        admission.step_begins([])
        running[0].token_ids.append(1)
        running[0].num_tokens += 1
        running[0].num_total_tokens += 1
        assert pool.extend(running[0], running[0].num_tokens) is not None
    assert not admission.admits(request(8, max_tokens=200), [], running, KVPool(60, 4)), "256 tokens now"


def test_requests_that_would_give_way_are_not_expected_to_grow():
    """Requests ranked behind it count with the blocks that they hold now: they are preempted when needed."""
    pool = KVPool(120, 4)
    admission = PredictedPeakAdmission(margin=0)
    running = [run(admission, pool, 8, max_tokens=200, request_id=i) for i in range(2)]
    late = request(8, max_tokens=200, request_id=3)
    assert not admission.admits(late, [], running, pool), "3 * 53 blocks"
    assert admission.admits(late, [], running[:1], pool), "2 * 53 plus the 2 that the other one holds"
    running += [run(admission, pool, 8, max_tokens=200, request_id=i) for i in range(4, 12)]
    assert not admission.admits(late, [], running[:1], pool), "2 * 53 plus 18"


def test_the_forecast_covers_exactly_the_running_requests():
    """With sharing, preemption, swaps and aborts; and it counts no block twice."""
    info = Info(num_blocks=40, num_host_blocks=5, max_model_len=100)
    core = make_core(info, block_size=4, admission="predicted_peak", watermark=0, scheduling_policy="priority")
    admission, pool = core.scheduler.policies.admission._inner, core.pool
    rng = random.Random(0)
    for request_id in range(60):
        prompt = [1] * rng.randrange(1, 20) + [rng.randrange(1, 50) for _ in range(rng.randrange(1, 8))]
        add(
            core,
            request_id,
            prompt,
            {"priority": rng.randrange(3)},
            max_tokens=rng.randrange(1, 60),
            n=1 + request_id % 2,
        )
    outputs, reasons = {}, {}
    while core.has_work:
        collect(core, outputs, reasons)
        core.abort(rng.randrange(400))
        running = core.scheduler.running
        assert len(admission._forecast) == len(running)
        num_unshared = pool.num_references - admission._num_hits // 4
        assert num_unshared == sum(len(each.block_ids) - admission._hits[each] // 4 for each in running)
        assert 0 <= num_unshared <= pool.num_used
    assert core.scheduler.num_preempted_total > 0
    assert admission._num_hits == 0


def test_a_burst_that_fits_now_but_not_later_waits():
    pool = KVPool(100, 4)
    admission = PredictedPeakAdmission()
    running = [run(admission, pool, 8, max_tokens=200, request_id=i) for i in range(2)]
    late = request(8, max_tokens=200, request_id=3)
    assert FreeBlocksAdmission().admits(late, [], running, pool)
    assert not admission.admits(late, [], running, pool), "3 * 52 blocks"
    for _ in range(30):
        admission.ended(request(8, 10))
    admission.step_begins([])
    assert admission.admits(late, [], running, pool), "outputs turn out to be short"


def test_admission_is_reconsidered_when_a_running_request_leaves():
    pool = KVPool(100, 4)
    admission = PredictedPeakAdmission()
    running = [run(admission, pool, 8, max_tokens=200, request_id=i) for i in range(2)]
    late = request(8, max_tokens=180, request_id=3)
    assert not admission.admits(late, [], running, pool)
    admission.left(running[1])
    pool.release(running.pop())
    assert admission.admits(late, [], running, pool), "because it was preempted, for example"


def test_a_preempted_request_returns_when_it_is_likely_to_stay():
    running_and_room = {0: True, 1: True, 2: False}
    for num_preemptions, admitted in running_and_room.items():
        pool = KVPool(100, 4)
        admission = PredictedPeakAdmission()
        running = [run(admission, pool, 8, max_tokens=168, request_id=0)]
        back = request(8, max_tokens=168, request_id=1)
        back.num_preemptions = num_preemptions
        assert admission.admits(back, [], running, pool) is admitted, "90 blocks at the peak"


def test_requests_admitted_in_the_same_step_count():
    pool = KVPool(100, 4)
    admission = PredictedPeakAdmission()
    running = [run(admission, pool, 8, max_tokens=116, request_id=0)]
    fits = []
    for request_id in range(1, 5):
        late = request(8, max_tokens=116, request_id=request_id)
        fits.append(admission.admits(late, [], running, pool))
        if fits[-1]:
            assert admission.admits(late, [], running, pool), "passed over by the budget, it does not count"
            pool.admit(late, [])
            pool.extend(late, 8)
            admission.admitted(late, 0)
            running.append(late)
    assert fits == [True, True, False, False], "32 blocks each at the end"


def test_a_shared_prefix_counts_once():
    info = Info(num_blocks=40, max_model_len=100)
    core = make_core(info, block_size=4, admission="predicted_peak")
    for request_id in range(10):
        add(core, request_id, [*range(1, 41), request_id + 1], max_tokens=4, ignore_eos=True)
    outputs, reasons = {}, {}
    collect(core, outputs, reasons)
    assert len(core.scheduler.running) == 10, "10 blocks of prefix and 2 more for each"


def test_a_request_that_never_fits_is_refused_with_the_arithmetic():
    core = make_core(Info(max_model_len=64, num_blocks=8), block_size=4)
    refused = core.add_request(AddRequest(1, [1] * 10, SamplingParams(max_tokens=23)))
    assert refused.code == "INVALID_ARG"
    assert refused.message == (
        "the request never fits: 10 prompt and up to 23 output tokens take 9 KV blocks of 4 tokens, and the pool has "
        "8; lower max_tokens or the prompt, or raise kv_cache_memory"
    )
    assert not core.has_work
    add(core, 2, [1] * 10, max_tokens=22, n=3, ignore_eos=True)  # each of its sequences fits alone
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert len(reasons) == 3


def burst(seed: int, **options):
    """40 requests at once whose blocks are ten times the pool's; clients declare twice what they use.

    Returns:
        preemptions of each, and the core.
    """
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 50) for _ in range(rng.randrange(4, 40))] for _ in range(40)]
    lengths = [rng.randrange(20, 100) for _ in prompts]
    demand = sum(-(-(len(prompt) + length) // 4) for prompt, length in zip(prompts, lengths))
    info = Info(max_model_len=160, num_blocks=max(demand // 10, 40), num_host_blocks=20)
    options = {"admission": "predicted_peak", "max_num_batched_tokens": 64, **options}
    core = make_core(info, block_size=4, **options)
    expected = {}
    for i, (prompt, length) in enumerate(zip(prompts, lengths)):
        whole = expected_output(prompt, SamplingParams(max_tokens=length, ignore_eos=True), info)[0]
        stop = whole[-1]
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=2 * length, stop_token_ids=[stop], ignore_eos=True)
        assert core.add_request(AddRequest(i, prompt, params)) is None
        expected[i, 0] = expected_output(prompt, params, info)
    requests = [sequences[0] for sequences in core._live.values()]
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert {key: (outputs[key], reasons[key]) for key in expected} == expected
    return [r.num_preemptions for r in requests], core


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preemption_victim": "least_preempted"},
        {"async_scheduling": True},
        {"swap_space": "1MiB", "preemption_mode": "swap"},
    ],
    ids=str,
)
def test_a_pool_of_a_tenth_of_the_demand_serves_all_without_a_storm(options):
    """Bounds: no request is preempted more than twice, and there is at most one preemption per two requests."""
    for seed in range(5):
        preemptions, core = burst(seed, **options)
        assert max(preemptions) <= 2
        assert sum(preemptions) <= len(preemptions) / 2
        assert core.scheduler.swap.num_swapped_out > 0 or "swap_space" not in options


def test_the_prediction_prevents_the_storm():
    with_prediction = sum(sum(burst(seed)[0]) for seed in range(5))
    without = sum(sum(burst(seed, admission="free_blocks")[0]) for seed in range(5))
    assert without > 3 * with_prediction
