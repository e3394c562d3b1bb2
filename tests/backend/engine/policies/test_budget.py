"""Latency targets and limits on partial prefills, on a virtual clock with known step costs."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from engine_rig import Info, PagedHashRunner, add, collect, done_step, expected_output, make_core, run_until_idle
from hypothesis import given
from hypothesis import strategies as st
from slots import SeenStep, SlotOwners

from inflight.config import ConfigError, EngineConfig
from inflight.engine import assembly
from inflight.engine.integrity import check_scheduler
from inflight.engine.policies.budget import MIN_CHUNK, STARVED_STEPS, LatencyBudget, PartialPrefillLimits
from inflight.engine.policies.cost_model import StepCost, StepLoad, step_load
from inflight.engine.policies.defaults import StaticBudget
from inflight.engine.policies.selection import make_policies
from inflight.engine.step import SchedulerOutput, StepOutput

INFO = Info(max_model_len=4096, num_blocks=2048)
COEFFICIENTS = (0.004, 100e-6, 0.2e-6, 0.0, 50e-6, 3e-9)
COST = StepCost.linear(*COEFFICIENTS)


class Machine:
    """Step times of a llama of 60 M parameters on one thread of an AMD EPYC: 8 streams beside a prompt.

    They are not linear, as the cost model assumes: tokens cost a tenth more each in steps of more than 96, where
    the kernels change, and more in very small chunks.  They are noisy: by a percent, and one step in twelve
    takes 6 to 15% longer.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def seconds(self, load: StepLoad) -> float:
        tokens = load.prefill_tokens
        seconds = 0.0003 + 0.00054 * load.sequences + 0.3e-6 * load.context_tokens
        seconds += tokens * (235e-6 * (1.1 if load.tokens > 96 else 1.0) + (15e-6 if tokens < 16 else 0.0))
        seconds += 0.12e-6 * load.attention_pairs
        late = self.rng.uniform(0.06, 0.15) if self.rng.random() < 0.08 else 0.0
        return seconds * (1 + self.rng.gauss(late, 0.01))


class Rig:
    """The real core; its steps are run by hand and take what `cost` says."""

    def __init__(
        self, cost: StepCost | Machine = COST, noise: float = 0.0, seed: int = 0, info: Info = INFO, **options
    ):
        defaults = {"model": "hash", "max_num_batched_tokens": 512, "enable_prefix_caching": False, "max_num_seqs": 32}
        self.config = EngineConfig.from_dict({**defaults, **options})
        self.core = assembly.make_core(
            self.config, PagedHashRunner(info, self.config.block_size, self.config.max_num_seqs)
        )
        self.scheduler = self.core.scheduler
        self.budget = self.scheduler.policies.budget.inner
        self.cost, self.noise, self.rng = cost, noise, random.Random(seed)
        self.slots = SlotOwners()
        self.steps: list[tuple[SeenStep, float]] = []

    def add(self, request_id: int, prompt: int, output: int = 200, **params: int) -> None:
        add(self.core, request_id, [request_id % 50] * prompt, max_tokens=output, ignore_eos=True, **params)

    def step(self) -> list[tuple[int, int]]:
        """(request id, tokens) of the next batch, executed."""
        out = self.scheduler.schedule()
        seconds = self.cost.seconds(step_load(out)) * (1 + self.rng.uniform(-self.noise, self.noise))
        self.scheduler.update(out, StepOutput([7 if samples else -1 for samples in out.samples]))
        for listener in self.core.listeners:
            listener.step_done(done_step(out, seconds))
        seen = self.slots.see(out)
        self.steps.append((seen, seconds))
        return list(zip(seen.request_ids, out.num_scheduled_tokens))

    def step_until_first_token(self, request_id: int) -> int:
        """How many steps it took."""
        for count in itertools.count(1):
            self.step()
            out, _ = self.steps[-1]
            if any(r == request_id and samples for r, samples in zip(out.request_ids, out.samples)):
                return count

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                check_scheduler(self.scheduler)
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps")


def has_decode(out: SchedulerOutput) -> bool:
    return 1 in out.num_scheduled_tokens


def test_the_static_budget_is_the_default():
    assert isinstance(make_policies(EngineConfig(model="m")).budget.inner, StaticBudget)  # type: ignore[attr-defined]


def test_beside_a_long_prompt_running_streams_stay_within_the_target():
    plain, kept = Rig(), Rig(itl_target_ms=12)
    for rig in (plain, kept):
        for request_id in range(4):
            rig.add(request_id, 64)
        for _ in range(30):
            rig.step()
        rig.add(9, 3000, 4)
        while 9 not in [request for request, _ in rig.step()]:
            pass
        rig.run()
    assert max(seconds for out, seconds in plain.steps if has_decode(out)) > 0.025
    waits = [seconds for out, seconds in kept.steps if has_decode(out)]
    assert max(waits) <= 0.012
    assert max(out.num_tokens for out, _ in kept.steps if has_decode(out)) > 2 * MIN_CHUNK, (
        "the room within the target is used"
    )


@pytest.mark.parametrize(("target", "prompt"), [(20, 6000), (40, 6000), (80, 6000), (40, 12_000)])
def test_with_measured_step_times_at_most_one_step_in_a_hundred_is_late(target, prompt):
    """The 99th percentile of the streams' gaps stays within the target, and the prompt takes little longer.

    At 12,000 tokens even a chunk of MIN_CHUNK takes longer than the target.
    """
    info = Info(max_model_len=16_384, num_blocks=16_384)
    waits, took = {}, {}
    for name, options in {"static": {}, "target": {"itl_target_ms": target}}.items():
        rig = Rig(Machine(seed=1), info=info, **options)
        for request_id in range(8):
            rig.add(request_id, 64, 10_000)
        for _ in range(20):
            rig.step()
        rig.add(8, 512, 1)
        for _ in range(80):
            rig.step()
        warm = len(rig.steps)
        rig.add(9, prompt, 1)
        rig.step_until_first_token(9)
        waits[name] = [seconds for _, seconds in rig.steps[warm:]]
        took[name] = sum(waits[name])
    late = [wait for wait in waits["target"] if wait > target / 1000]
    assert len(late) <= len(waits["target"]) / 100
    assert max(waits["target"]) < 1.1 * target / 1000
    assert took["target"] < (2.0 if target == 20 else 1.35) * took["static"]


def test_where_the_usual_chunk_does_not_fit_a_smaller_one_does():
    rig = Rig(StepCost.linear(0.004, 0.0, 0.0, 0.0, 500e-6, 0.0), itl_target_ms=10)
    for request_id in range(4):
        rig.add(request_id, 20, 1000)
    rig.step()
    rig.add(9, 1200, 2)
    rig.run()
    chunks = [n for out, _ in rig.steps[1:] for n in out.num_scheduled_tokens if n > 1]
    assert min(chunks[8:-1]) >= 6
    assert chunks[-2] >= 11
    assert sum(seconds > 0.010 for _, seconds in rig.steps) <= 2


def test_headroom_is_the_largest_overrun_of_the_last_hundred_steps():
    rig = Rig(itl_target_ms=12)
    assert rig.budget.headroom == 0.25, "nothing is known yet"
    for request_id in range(4):
        rig.add(request_id, 64, 3000)
    rig.step()

    def prefill(steps: int, factor: float = 1.0) -> float:
        rig.cost = StepCost.linear(*(factor * coefficient for coefficient in COEFFICIENTS))
        for _ in range(steps):
            if len(rig.scheduler.running) == 4 and not len(rig.scheduler.waiting):
                rig.add(9, 3000, 1)
            rig.step()
        return rig.budget.headroom

    assert 0.125 <= prefill(50) <= 0.25, "half of the hundred are known"
    assert prefill(250) < 0.01
    assert prefill(1, 1.2) == pytest.approx(0.2, abs=0.02)
    assert prefill(80) == pytest.approx(0.2, abs=0.02)
    assert prefill(40) < 0.02
    assert prefill(1, 1.9) < 0.02, "an outlier, which no headroom covers"


def test_the_target_covers_making_the_step(monkeypatch):
    rig = Rig(itl_target_ms=12)
    rig.add(1, 20)
    observed = []
    monkeypatch.setattr(rig.budget, "step_done", lambda step: observed.append(step.result.ended - step.start))
    prepare = rig.core.runner.prepare
    monkeypatch.setattr(rig.core.runner, "prepare", lambda out: time.sleep(0.02) or prepare(out))
    rig.core.step()
    assert observed[0] >= 0.02


def test_without_decodes_a_prompt_gets_the_whole_budget():
    rig = Rig(itl_target_ms=1)
    rig.add(1, 1200, 2)
    assert [rig.step() for _ in range(3)] == [[(1, 512)], [(1, 512)], [(1, 176)]]


def test_the_first_chunks_are_small_while_nothing_is_known():
    rig = Rig(itl_target_ms=1000)
    rig.add(1, 16)
    rig.step()
    rig.add(2, 2000, 2)
    chunks = [dict(rig.step()).get(2, 0) for _ in range(6)]
    assert chunks == [32, 64, 128, 256, 511, 511]


def test_a_target_that_cannot_be_met_yields_to_progress():
    rig = Rig(itl_target_ms=0.1)
    for request_id in range(3):
        rig.add(request_id, 20)
    rig.step()
    rig.add(9, 100, 2)
    asked = []
    while 9 not in {r for out, _ in rig.steps for r, s in zip(out.request_ids, out.samples) if s}:
        asked.append(dict(rig.step()).get(9, 0))
    assert [n for n in asked if n] == [MIN_CHUNK] * 3 + [4]
    assert len(asked) <= STARVED_STEPS * -(-100 // MIN_CHUNK)
    assert not any(a and b for a, b in itertools.pairwise(asked)), "the steps in between are decodes only"


@given(
    fixed=st.floats(0.001, 0.02),
    jump=st.sampled_from([0.0, 0.3]),
    per_token=st.floats(5e-6, 200e-6),
    per_sequence=st.floats(0, 300e-6),
    per_context=st.floats(0, 1e-6),
    per_pair=st.floats(0, 1e-8),
    slack=st.floats(1.5, 4.0),
    noise=st.sampled_from([0.0, 0.05]),
    prompts=st.lists(st.integers(40, 1500), min_size=1, max_size=6),
    seed=st.integers(0, 9),
)
def test_steps_stay_within_the_target_at_any_cost_of_a_step(
    fixed, jump, per_token, per_sequence, per_context, per_pair, slack, noise, prompts, seed
):
    """The target is `slack` times a decode step; after a warm-up no step with decodes takes longer."""
    cost = StepCost.linear(fixed, per_sequence, per_context, jump * fixed, per_token, per_pair)
    decode = fixed + 8 * per_sequence + 8 * 700 * per_context
    target = slack * decode + jump * fixed + MIN_CHUNK * per_token + (MIN_CHUNK * 1600) * per_pair
    rig = Rig(cost, noise, seed, itl_target_ms=1000 * target)
    for request_id in range(4):
        rig.add(request_id, 64, 600)
    rig.add(5, 900, 2)  # the warm-up: chunks of a prompt beside decodes
    while any(r.request_id == 5 for r in (*rig.scheduler.running, *rig.scheduler.waiting)):
        rig.step()
    for _ in range(20):
        rig.step()
    warm = len(rig.steps)
    for request_id, prompt in enumerate(prompts, 10):
        rig.add(request_id, prompt, 2)
    rig.run()
    waits = [seconds for out, seconds in rig.steps[warm:] if has_decode(out)]
    late = [wait for wait in waits if wait > target]
    assert len(late) <= len(waits) * (0.01 if noise else 0.0), (max(late), target)
    assert max(waits) <= target * (1.25 if noise else 1.0)


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=10),
    target=st.sampled_from([None, 1e-4, 1.0, 1000.0]),
    partial=st.integers(1, 3),
    threshold=st.sampled_from([0, 2, 16]),
    budget=st.sampled_from([1, 5, 64]),
)
def test_under_any_budget_every_request_gets_its_tokens(arrivals, target, partial, threshold, budget):
    info = Info(num_blocks=40)
    core = make_core(
        info, block_size=4, max_num_batched_tokens=budget, max_num_seqs=4, itl_target_ms=target,
        max_num_partial_prefills=partial, long_prefill_token_threshold=threshold,
    )  # fmt: skip
    outputs: dict = {}
    reasons: dict = {}
    expected = {}
    for request_id, (gap, length, max_tokens) in enumerate(arrivals):
        for _ in range(gap):
            collect(core, outputs, reasons)
        prompt = [1 + (request_id + k) % 7 for k in range(length)]
        params = add(core, request_id, prompt, max_tokens=max_tokens, ignore_eos=True)
        expected[request_id, 0] = expected_output(prompt, params, info)
    run_until_idle(core, outputs, reasons)
    assert {key: (outputs[key], reasons[key]) for key in expected} == expected


@given(
    prompts=st.lists(st.integers(2, 400), min_size=1, max_size=8),
    every=st.integers(1, 30),
    streams=st.integers(1, 4),
)
def test_prompts_are_never_starved_for_longer_than_stated(prompts, every, streams):
    """With a target that no step meets, one in STARVED_STEPS consecutive steps with a prompt computes some of it."""
    rig = Rig(itl_target_ms=1e-3)
    for request_id in range(streams):
        rig.add(request_id, 8, 2000)
    rig.step()
    waiting = dict(enumerate(prompts, 10))
    starved = 0
    for step in range(20_000):
        if step % every == 0 and waiting:
            request_id = min(waiting)
            rig.add(request_id, waiting.pop(request_id), 1)
        has_prompt = len(rig.scheduler.waiting) or any(
            r.num_tokens - r.num_computed_tokens > 1 for r in rig.scheduler.running
        )
        out_tokens = [tokens for _, tokens in rig.step()]
        chunks = [tokens for tokens in out_tokens if tokens > 1]
        assert sum(chunks) <= MIN_CHUNK
        starved = starved + 1 if has_prompt and len(out_tokens) == streams and not chunks else 0
        assert starved < STARVED_STEPS
        if not waiting and not has_prompt:
            return
    raise AssertionError("a prompt was never computed")


@given(
    prompt=st.integers(2, 500),
    target=st.floats(3.0, 20.0),
    per_token=st.sampled_from([50e-6, 500e-6, 1e-3]),
    noise=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 9),
)
def test_under_any_target_a_prompt_is_computed_within_the_stated_steps(prompt, target, per_token, noise, seed):
    rig = Rig(StepCost.linear(0.004, 100e-6, 0.0, 0.0, per_token), noise, seed, itl_target_ms=target)
    for request_id in range(3):
        rig.add(request_id, 8, 2000)
    for _ in range(20):
        rig.step()
    rig.add(9, prompt, 2)
    assert rig.step_until_first_token(9) <= STARVED_STEPS * (prompt / MIN_CHUNK + 1)


def test_a_short_prompt_passes_long_ones():
    rig = Rig(max_num_partial_prefills=2, long_prefill_token_threshold=128)
    rig.add(1, 1000, 2)
    rig.add(2, 1000, 2)
    rig.add(3, 40, 2)
    assert rig.step() == [(1, 128), (3, 40)], "the second long one is passed over"
    rig.run()
    batches = [out.request_ids for out, _ in rig.steps]
    first = [next(i for i, batch in enumerate(batches) if request_id in batch) for request_id in (1, 2, 3)]
    assert first == [0, 7, 0], "it starts in the step in which the first one ends"


def test_a_passed_over_prompt_does_not_starve():
    """Short prompts keep coming; the long one at the front starts when the long one before it is done."""
    rig = Rig(max_num_partial_prefills=2, long_prefill_token_threshold=64)
    rig.add(1, 640, 2)
    rig.add(2, 640, 2)
    started = None
    for step in range(60):
        rig.add(100 + step, 30, 2)
        if started is None and 2 in dict(rig.step()):
            started = step
    assert started == 9


def test_a_prompt_with_requested_log_probabilities_counts_for_more_and_is_passed():
    rig = Rig()
    rig.add(1, 1000, 2, prompt_logprobs=96)  # a token counts as four
    rig.add(2, 1000, 2, prompt_logprobs=32)
    rig.add(3, 40, 2)
    assert rig.step() == [(1, 128), (3, 40)], "the second one would make the step longer still"
    assert rig.step() == [(3, 1), (1, 128)]
    rig.run()
    firsts = [next(i for i, (out, _) in enumerate(rig.steps) if number in out.request_ids) for number in (1, 2, 3)]
    assert firsts == [0, 7, 0]


@pytest.mark.parametrize(("count", "tokens"), [(None, 500), (0, 500), (1, 496), (20, 315), (100, 124), (-1, 15)])
def test_the_weight_of_a_prompt_token_with_log_probabilities(count, tokens):
    rig = Rig(max_logprobs=-1)
    params = {} if count is None else {"prompt_logprobs": count}
    rig.add(1, 500, 2, **params)
    assert rig.step() == [(1, tokens)]


def test_a_step_of_few_tokens_computes_one_of_a_prompt_with_log_probabilities():
    rig = Rig(max_num_batched_tokens=2)
    rig.add(1, 5, 2, prompt_logprobs=100)
    rig.add(2, 5, 2, prompt_logprobs=100)
    assert [rig.step() for _ in range(3)] == [[(1, 1)]] * 3
    rig.run()


def test_a_request_with_one_token_to_compute_is_a_decode_even_when_readmitted():
    """A swapped request returns through admission; no target delays it."""
    rig = Rig(itl_target_ms=0.001)
    rig.add(1, 20)
    for _ in range(3):
        rig.step()
    rig.budget.step_begins(rig.scheduler.running)
    request = rig.scheduler.running[0]
    assert rig.budget.grant(request, 1, 1) == 1
    assert rig.budget.grant(request, 2, 2) == 0


def test_at_most_sixteen_requests_are_passed_over_in_a_step():
    rig = Rig(max_num_partial_prefills=2, long_prefill_token_threshold=64)
    for request_id in range(17):
        rig.add(request_id, 600, 2)
    rig.add(99, 20, 2)
    assert rig.step() == [(0, 64)], "16 long prompts ahead of the short one are passed over"
    rig.core.abort(5)
    assert (99, 20) in rig.step()


def test_without_a_threshold_a_prompt_gets_its_share_of_the_step():
    rig = Rig(max_num_partial_prefills=4, max_long_partial_prefills=4)
    for request_id in range(5):
        rig.add(request_id, 1000, 2)
    assert rig.step() == [(request_id, 128) for request_id in range(4)]


def test_a_cached_prefix_does_not_count_towards_a_prompt_s_length():
    rig = Rig(max_num_partial_prefills=2, long_prefill_token_threshold=128, enable_prefix_caching=True)
    rig.add(1, 1000, 2)
    rig.run()
    rig.add(2, 1000, 2)
    add(rig.core, 3, [1] * 1000, max_tokens=2, ignore_eos=True)
    assert rig.step() == [(2, 128), (3, 8)], "all but its last tokens are cached: it is short"


def test_limits_and_target_combine():
    config = EngineConfig(model="m", itl_target_ms=20.0, max_num_partial_prefills=3)
    budget = make_policies(config).budget.inner  # type: ignore[attr-defined]
    assert isinstance(budget, PartialPrefillLimits)
    assert isinstance(budget.inner, LatencyBudget)
    assert budget.inner.target == 0.02


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"itl_target_ms": 0}, "itl_target_ms=0"),
        ({"max_long_partial_prefills": 2}, "max_long_partial_prefills=2 is more than max_num_partial_prefills=1"),
        ({"long_prefill_token_threshold": 99, "max_model_len": 98}, "no prompt is that long"),
    ],
)
def test_contradictory_options_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_dict({"model": "m", **values})
