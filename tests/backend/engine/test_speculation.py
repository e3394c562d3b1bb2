"""`speculative_config` changes no output, leaks nothing, and saves steps where a text repeats itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import engine_rig
import pytest
from engine_rig import (
    Info,
    add,
    collect,
    expected_output,
    make_core,
    make_core_with_draft_model,
    repeating_model,
    run_until_idle,
)
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.core import EngineCore
from inflight.engine.drafting.adaptive_drafter import AdaptiveDrafter
from inflight.engine.drafting.draft_model import DraftModel, ModelGuesser
from inflight.engine.drafting.safe_drafter import SafeDrafter
from inflight.engine.integrity import check_core, check_draft_model

METHODS: list[dict[str, Any]] = [
    {"method": "suffix"},
    {"method": "suffix", "suffix_decoding_max_cached_requests": 0, "num_speculative_tokens": 3},
    {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
]
MODEL: dict[str, Any] = {"model": "hash", "num_speculative_tokens": 5}


def even_clock() -> Callable[[], float]:
    """Every step takes the same time: drafts are cheap."""
    ticks = itertools.count()
    return lambda: next(ticks) / 1000


class StepClock:
    """Every step takes a millisecond, and nothing else takes any time."""

    def __init__(self) -> None:
        self.runner: Any = None

    def __call__(self) -> float:
        return len(self.runner.batch_sizes) / 1000 if self.runner is not None else 0.0


def drafter_of(core: EngineCore) -> AdaptiveDrafter:
    safe = core.scheduler.policies.drafter
    assert isinstance(safe, SafeDrafter) and isinstance(safe.inner, AdaptiveDrafter)
    return safe.inner


def model_of(core: EngineCore) -> DraftModel:
    guesser = drafter_of(core)._guesser
    assert isinstance(guesser, ModelGuesser)
    return guesser._model


@given(
    st.sampled_from([*METHODS, MODEL]),
    st.tuples(st.integers(1, 12), st.sampled_from([20, 128])),  # the draft model's blocks of 16 tokens, and its length
    st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([1, 2, 4, 16]),
            "max_num_batched_tokens": st.sampled_from([1, 2, 7, 64, 2048]),
            "max_num_seqs": st.sampled_from([1, 2, 3, 8]),
            "enable_prefix_caching": st.booleans(),
            "async_scheduling": st.booleans(),
            "preemption_mode": st.sampled_from(["recompute", "swap"]),
            "swap_space": st.just("1MiB"),
            "scheduling_policy": st.sampled_from(["fcfs", "priority", "sjf"]),
            "itl_target_ms": st.sampled_from([None, 0.001, 100]),
            "tenants": st.sampled_from([{}, {"*": {}}]),
        }
    ),
    st.integers(1, 4),
    st.lists(
        st.tuples(
            st.integers(0, 8),  # steps before it arrives
            st.lists(st.integers(1, 3), min_size=1, max_size=30),
            st.integers(1, 60),  # max_tokens
            st.sampled_from([1, 1, 3]),  # n
            st.one_of(st.none(), st.integers(0, 30)),  # steps until it is aborted
            st.sampled_from(["a", "b"]),
            st.one_of(st.just(0), st.integers(0, 20)),  # output tokens that it arrives with
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_every_request_gets_the_tokens_that_it_gets_without(
    method: dict[str, Any], draft_size: tuple[int, int], options: dict[str, Any], size: int, load: list[Any]
) -> None:
    info = Info(num_blocks=size * 128 // options["block_size"], num_host_blocks=20, max_model_len=128)
    with repeating_model():
        if method is MODEL:
            num_blocks, length = draft_size
            draft_info = Info(num_blocks=num_blocks * 16 // options["block_size"], max_model_len=length)
            core = make_core_with_draft_model(info, draft_info, even_clock(), speculative_config=method, **options)
        else:
            core = make_core(info, even_clock(), speculative_config=method, **options)
        outputs: dict[Any, list[int]] = {}
        reasons: dict[Any, str] = {}
        expected: dict[Any, Any] = {}
        aborts: dict[int, int] = {}
        for request_id, (gap, prompt, max_tokens, n, abort_after, tenant, given_count, stops) in enumerate(load):
            for _ in range(gap):
                collect(core, outputs, reasons)
            params = add_params = {"max_tokens": max_tokens, "n": n, "stop_token_ids": [7, 8] if stops else []}
            tokens, reason = expected_output(prompt, engine_rig.SamplingParams(**params), info)
            given_tokens = tokens[: min(given_count, len(tokens) - 1)]
            resumed = [given_tokens for _ in range(n)] if given_tokens else []
            add(core, request_id, prompt, {"tenant": tenant, "output_token_ids": resumed}, **add_params)
            for index in range(n):
                expected[request_id, index] = tokens[len(given_tokens) :], reason
            if abort_after is not None:
                aborts[request_id] = abort_after
        for step in range(max(aborts.values(), default=0) + 1):
            for request_id, when in aborts.items():
                if when == step:
                    core.abort(request_id)
                    check_core(core)
            collect(core, outputs, reasons)
        run_until_idle(core, outputs, reasons)
    for key, (tokens, reason) in expected.items():
        if key in reasons or key[0] not in aborts:
            assert (outputs[key], reasons[key]) == (tokens, reason)
        else:
            assert outputs.get(key, []) == tokens[: len(outputs.get(key, []))]
    drafter = drafter_of(core)
    assert not drafter._sequences, "an ended request is remembered"
    if method is MODEL:
        model = model_of(core)
        check_draft_model(model)
        assert not model._rows, "the draft model remembers an ended request"
    else:
        assert not drafter._guesser._own, "an ended request is remembered"


@pytest.mark.parametrize("method", METHODS)
def test_a_text_that_repeats_itself_takes_fewer_steps(method: dict[str, Any]) -> None:
    with repeating_model():
        info = Info(max_model_len=600, num_blocks=600)
        core = make_core(info, even_clock(), speculative_config=method)
        prompt = [1, 2, 3]
        add(core, 0, prompt, max_tokens=500)
        outputs: dict[Any, list[int]] = {}
        run_until_idle(core, outputs, {})
        assert outputs[0, 0] == expected_output(prompt, engine_rig.SamplingParams(max_tokens=500), info)[0]
    counts = core.scheduler.policies.draft_counts
    assert counts.accepted > 100
    assert core.runner.num_drafts == counts.tokens and core.runner.num_accepted == counts.accepted  # type: ignore[attr-defined]
    assert len(core.runner.batch_sizes) == 1 + 500 - 1 - counts.accepted  # type: ignore[attr-defined]
    assert sum(counts.at) == counts.accepted and counts.at == sorted(counts.at, reverse=True)
    assert core.stats(engine_rig.SchedulerOutput(), 0.0).draft_totals == counts.totals()


def test_a_later_request_copies_an_earlier_output_of_its_tenant() -> None:
    with repeating_model():
        clock = StepClock()
        core = make_core(Info(max_model_len=200, num_blocks=200), clock, speculative_config={"method": "suffix"})
        clock.runner = core.runner
        accepted = []
        for number, tenant in enumerate(["a", "b", "a"]):
            before = core.scheduler.policies.draft_counts.accepted
            add(core, number, [1, 2, 3], {"tenant": tenant}, max_tokens=18)
            run_until_idle(core, {}, {})
            accepted.append(core.scheduler.policies.draft_counts.accepted - before)
    assert accepted[2] > max(accepted[:2])


def with_draft_model(**options: Any) -> EngineCore:
    info = Info(max_model_len=600, num_blocks=600)
    return make_core_with_draft_model(info, info, even_clock(), **options)


def test_a_draft_model_that_is_often_right_saves_steps() -> None:
    core = with_draft_model(speculative_config=MODEL)
    add(core, 0, [1, 2, 3], max_tokens=300, ignore_eos=True)
    outputs: dict[Any, list[int]] = {}
    run_until_idle(core, outputs, {})
    params = engine_rig.SamplingParams(max_tokens=300, ignore_eos=True)
    assert outputs[0, 0] == expected_output([1, 2, 3], params, core.info)[0]
    counts = core.scheduler.policies.draft_counts
    assert counts.accepted > 80 and counts.tokens > counts.accepted
    assert len(core.runner.batch_sizes) == 300 - counts.accepted  # type: ignore[attr-defined]


def test_a_draft_model_computes_each_token_once_unless_it_was_refused() -> None:
    """A request's tokens, the drafted tokens, and per draft one token for its logits."""
    core = with_draft_model(speculative_config=MODEL)
    add(core, 0, list(range(1, 41)), max_tokens=200, ignore_eos=True)
    run_until_idle(core, {}, {})
    model, counts = model_of(core), core.scheduler.policies.draft_counts
    assert model.num_computed <= 40 + 200 + counts.tokens


def test_the_draft_model_runs_once_for_all_sequences_of_a_step() -> None:
    core = with_draft_model(speculative_config=MODEL, max_num_seqs=8)
    for number in range(8):
        add(core, number, [1 + number, 2, 3], max_tokens=60, ignore_eos=True)
    run_until_idle(core, {}, {})
    sizes = core.runner.draft_runner.batch_sizes  # type: ignore[attr-defined]
    assert sum(size == 8 for size in sizes) > 10


def test_a_draft_model_without_room_for_a_request_drafts_for_the_others() -> None:
    core = make_core_with_draft_model(
        Info(max_model_len=200, num_blocks=200), Info(max_model_len=200, num_blocks=8), even_clock(), block_size=4
    )
    add(core, 0, list(range(1, 49)), max_tokens=40, ignore_eos=True)
    run_until_idle(core, {}, {})
    assert not core.scheduler.policies.draft_counts.drafts
    add(core, 1, list(range(1, 41)), max_tokens=40, ignore_eos=True)
    add(core, 2, [1, 2, 3], max_tokens=24, ignore_eos=True)
    run_until_idle(core, {}, {})
    assert core.scheduler.policies.draft_counts.accepted > 5


def test_a_failed_step_of_the_draft_model_affects_no_request() -> None:
    core = with_draft_model(speculative_config=MODEL)
    model = model_of(core)
    collect_draft, failing = model._runner.collect, [False, True, False, False] * 30
    model._runner.collect = lambda ticket: engine_rig.msgspec.structs.replace(
        collect_draft(ticket), **({"failure": "no memory", "token_ids": []} if failing.pop() else {})
    )
    outputs: dict[Any, list[int]] = {}
    for number in range(2):
        add(core, number, [1, 2, 3], max_tokens=30, ignore_eos=True)
    run_until_idle(core, outputs, {})
    params = engine_rig.SamplingParams(max_tokens=30, ignore_eos=True)
    assert list(outputs.values()) == [expected_output([1, 2, 3], params, core.info)[0]] * 2
    assert core.scheduler.policies.draft_counts.accepted
    check_draft_model(model)


def test_a_draft_model_that_raises_is_no_worse_than_none(caplog: pytest.LogCaptureFixture) -> None:
    core = with_draft_model(speculative_config=MODEL)
    calls = itertools.count()

    def fails(ticket: object) -> None:
        next(calls)
        raise RuntimeError("broken")

    core.runner.draft_runner.collect = fails  # type: ignore[attr-defined]
    outputs: dict[Any, list[int]] = {}
    for number in range(3):
        add(core, number, [1, 2, 3], max_tokens=30, ignore_eos=True)
    run_until_idle(core, outputs, {})
    assert all(len(tokens) == 30 for tokens in outputs.values())
    assert caplog.text.count("RuntimeError: broken") == 1
    assert next(calls) <= 30, "called once per step, not once per row"
    assert not model_of(core)._rows, "it is unknown what they have computed"
