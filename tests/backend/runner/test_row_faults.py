"""A request that raises in a step fails alone: the others get the tokens that they get without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from checkpoints import greedy_reference, make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from offline import make_core, make_device_core
from panics import Panic
from sampling_tables import new_table

from inflight.engine.core import EngineCore
from inflight.engine.deltas import SequenceDelta
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput
from inflight.grammars.base import NO_SEQUENCE, SequenceId
from inflight.sampling.rules import RULES, RowBatch

BAD = 77  # the seed of a request that makes a rule raise
SAYS = "internal error in a step of this request: "


class FaultyRule:
    """Raises for the request with `stop_token_ids` [BAD] where `FaultyRule.place` says, from its second token on."""

    is_mask: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    warm_up_params: ClassVar[SamplingParams] = SamplingParams()
    place: ClassVar[str] = ""
    error: ClassVar[type[BaseException]] = ValueError

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.bad = np.zeros(max_num_seqs, dtype=bool)

    def set_row(
        self, slot: int, params: SamplingParams, eos_token_ids: Sequence[int], sequence: SequenceId = NO_SEQUENCE
    ) -> bool:
        self.bad[slot] = BAD in params.stop_token_ids
        if self.bad[slot] and self.place == "set_row":
            raise self.error("cannot take it")
        return bool(self.bad[slot])

    def prepare(self, batch: RowBatch) -> FaultyEdit | None:
        late = batch.positions > batch.num_prompt_tokens
        if self.place == "prepare" and (self.bad[batch.slots] & late).any():
            raise self.error("cannot prepare it")
        return FaultyEdit() if self.place == "apply" and (self.bad[batch.slots] & late).any() else None


class FaultyEdit:
    def apply(self, logits: torch.Tensor) -> None:
        raise FaultyRule.error("cannot apply it")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("faults"))


def serve(core: EngineCore, requests: dict[int, tuple[list[int], dict[str, Any]]]) -> tuple[dict, dict[int, str]]:
    """Deltas and failures of all requests; every fourth arrives at each step."""
    deltas: dict[int, list[SequenceDelta]] = {request_id: [] for request_id in requests}
    failed: dict[int, str] = {}
    waiting = list(requests.items())
    while waiting or core.has_work:
        for request_id, (prompt, params) in waiting[:4]:
            sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
            assert core.add_request(AddRequest(request_id, prompt, sampling)) is None
        del waiting[:4]
        message = core.step()
        check_core(core)
        for delta in message.deltas:
            deltas[delta.request_id].append(delta)
        assert all(failure.code == "INTERNAL" for failure in message.failed)
        failed.update((failure.request_id, failure.message) for failure in message.failed)
    return deltas, failed


def tokens(deltas: list[SequenceDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def runner_of(core: EngineCore) -> Any:
    return getattr(core.runner, "runner", core.runner)


def with_faulty_rule(core: EngineCore, place: str, error: type[BaseException] = ValueError) -> EngineCore:
    runner = runner_of(core)
    FaultyRule.place, FaultyRule.error = place, error
    rules = [*(type(rule) for _, rule in runner.table._rules), FaultyRule]
    table = new_table(core.config.max_num_seqs, core.info.vocab_size, runner.device, rules)
    runner.table = runner.faults._table = table
    return core


@pytest.mark.parametrize(
    ("make", "place", "overlap", "error"),
    [
        (make_core, "set_row", False, ValueError),
        (make_core, "prepare", True, Panic),
        (make_core, "apply", False, Panic),
        (make_device_core, "set_row", True, Panic),
        (make_device_core, "prepare", True, ValueError),
        (make_device_core, "prepare", False, Panic),
    ],
)
def test_a_rule_that_raises_for_a_request_ends_that_one(
    checkpoint: str, make: Any, place: str, overlap: bool, error: type[BaseException]
) -> None:
    core = make(checkpoint, async_scheduling=overlap, max_num_seqs=6, block_size=4)
    prompts = {number: [number + 3] * 9 for number in range(12)}
    requests = {number: (prompt, {"repetition_penalty": 1.0001}) for number, prompt in prompts.items()}
    for number in (2, 7):
        requests[number] = prompts[number], {"stop_token_ids": [BAD]}
    deltas, failed = serve(with_faulty_rule(core, place, error), requests)
    assert sorted(failed) == [2, 7]
    assert all(reason.startswith(f"{SAYS}{error.__name__}: cannot ") for reason in failed.values())
    expected = greedy_reference(checkpoint, list(prompts.values()), [8] * 12)
    for number, output in enumerate(expected):
        assert tokens(deltas[number]) == (output if number not in failed else output[: int(place != "set_row")])
    again, failed = serve(core, dict.fromkeys(range(12, 15), (prompts[0], {})))
    assert not failed, "nothing of them is left in their slots"
    assert [tokens(output) for output in again.values()] == [expected[0]] * 3


def raise_for(core: EngineCore, poison: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[int]:
    """Let the forward pass raise whenever it sees a token; returns the sizes of all passes."""
    runner = runner_of(core)
    forward = runner.forward.run
    sizes: list[int] = []

    def failing(input_ids: torch.Tensor, *args: Any) -> Any:
        sizes.append(input_ids.shape[-1])
        if (input_ids == poison).any():
            raise error
        return forward(input_ids, *args)

    monkeypatch.setattr(runner.forward, "run", failing)
    return sizes


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("of a signal handler"), BaseException("other")])
def test_an_interrupt_is_no_requests_fault(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    core = make_core(checkpoint, max_num_seqs=4, block_size=4)
    raise_for(core, 7, monkeypatch, error)
    with pytest.raises(type(error)):
        serve(core, {0: ([7] * 5, {}), 1: ([8] * 5, {})})


PROMPTS = [[number + 5] * (3 + number % 7) for number in range(32)]


def test_the_others_of_a_step_do_not_notice(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities, of prompts too, penalties and n > 1 are as without it; it is found in a few passes."""
    poison = PROMPTS[9][0]
    options = {
        "logit_bias": {poison: -100.0},
        "logprobs": 2,
        "prompt_logprobs": 1,
        "presence_penalty": 0.5,
        "n": 2,
        "temperature": 1.0,
    }
    requests = {number: (prompt, {**options, "seed": number}) for number, prompt in enumerate(PROMPTS)}
    config = {"async_scheduling": True, "max_num_seqs": 64, "max_num_batched_tokens": 64, "block_size": 4}
    alone, failed = serve(make_core(checkpoint, **config), {n: r for n, r in requests.items() if n != 9})
    assert not failed
    core = make_core(checkpoint, **config)
    sizes = raise_for(core, poison, monkeypatch, IndexError("no such thing"))
    beside, failed = serve(core, requests)
    assert failed == {9: f"{SAYS}IndexError: no such thing"}
    assert {number: by_sequence(found) for number, found in beside.items() if number != 9} == {
        number: by_sequence(found) for number, found in alone.items()
    }
    assert len(sizes) < 80


def by_sequence(deltas: list[SequenceDelta]) -> dict[int, Any]:
    """Tokens and log probabilities of each sequence, and the prompt's; steps may have cut them otherwise."""
    found: dict[int, Any] = {}
    for delta in deltas:
        entry = found.setdefault(delta.index, [[], [], [], None])
        entry[0] += delta.token_ids
        entry[1] += as_list(delta.logprobs)
        entry[2] += as_list(delta.prompt_logprobs)
        entry[3] = delta.finish_reason or entry[3]
    return found


def as_list(entries: Any) -> list[Any]:
    return list(entries) if entries is not None else []


@pytest.fixture(scope="module")
def small_core(checkpoint: str) -> EngineCore:
    return make_core(checkpoint, max_num_seqs=16, max_num_batched_tokens=64, block_size=4)


@settings(max_examples=15, deadline=None)
@given(poisoned=st.sets(st.integers(0, 15), max_size=5))
def test_any_of_them_may_be_to_blame(small_core: EngineCore, poisoned: set[int]) -> None:
    core = small_core
    prompts = {number: PROMPTS[number] + ([198] * (number in poisoned)) for number in range(16)}
    with pytest.MonkeyPatch.context() as patch:
        raise_for(core, 198, patch, KeyError("x"))
        _, failed = serve(core, {n: (prompt, {"logit_bias": {198: -100.0}}) for n, prompt in prompts.items()})
    assert set(failed) == poisoned


def test_an_error_that_does_not_come_again_fails_no_request(
    checkpoint: str, small_core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = small_core
    runner = runner_of(core)
    forward, calls = runner.forward.run, iter(range(10**6))

    def failing(*args: Any) -> Any:
        result = forward(*args)
        if next(calls) == 3:
            raise RuntimeError("once")
        return result

    monkeypatch.setattr(runner.forward, "run", failing)
    deltas, failed = serve(core, {number: (prompt, {}) for number, prompt in enumerate(PROMPTS[:4])})
    assert not failed
    assert [tokens(output) for output in deltas.values()] == greedy_reference(checkpoint, PROMPTS[:4], [8] * 4)


def test_every_rule_may_be_asked_again_for_the_same_step(
    small_core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are made again in parts: what rules remember of the output must not count twice."""
    params = {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "bad_words_ids": [[5, 6]], "min_tokens": 3}
    requests = {number: (prompt, {**params, "max_tokens": 12}) for number, prompt in enumerate(PROMPTS[:6])}
    core = small_core
    plain, _ = serve(core, requests)
    runner = runner_of(core)
    sample = runner._sample

    def failing(out: SchedulerOutput, *args: Any) -> Any:
        result = sample(out, *args)
        if len(out.slots) > 1:
            raise RuntimeError("not together")
        return result

    monkeypatch.setattr(runner, "_sample", failing)
    beside, failed = serve(core, requests)
    assert not failed
    assert {n: tokens(found) for n, found in beside.items()} == {n: tokens(found) for n, found in plain.items()}
    assert len(RULES) >= 5
