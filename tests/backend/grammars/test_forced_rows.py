"""Tokens that a grammar forces are computed without logits, and no answer differs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offline import make_core, make_device_core
from panics import Panic
from tokenizers import Tokenizer

from inflight.device.batch_state import BatchState, StepInputs
from inflight.engine.core import EngineCore
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput
from inflight.grammars.guidance import GuidanceGrammars
from inflight.grammars.spec import GrammarSpec
from inflight.runner.forced_rows import ForcedRows, ForcedTokens
from inflight.runner.model_runner import ModelRunner
from inflight.runner.pipeline import ThreadedRunner
from inflight.runner.step_output import step_output
from inflight.sampling import UNUSABLE_LOGITS
from inflight.sampling.sampler import Sampler
from inflight.sampling.unusable import NO_TOKEN

from .conftest import EOS
from .test_answers import SCHEMA, Answers, grammar_params, json_spec, mixed

TEXTS = ["the quick brown fox", "a", "the quick brown fox jumps over the lazy dog and runs"]
WHOLE = GrammarSpec("choice", json.dumps([TEXTS[2]]))
NO_TOKENS = np.empty(0, dtype=np.int64)


def runner_of(core: EngineCore) -> ModelRunner:
    runner: Any = core.runner
    return runner.runner if isinstance(runner, ThreadedRunner) else runner


def count_logits(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of logits of each step from now on."""
    found: list[int] = []
    forward = runner_of(core).forward
    run = forward.run

    def counting(ids: Any, positions: Any, keep: torch.Tensor, *others: Any) -> Any:
        found.append(len(keep))
        return run(ids, positions, keep, *others)

    monkeypatch.setattr(forward, "run", counting)
    return found


def without_forced_rows(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_of(core).forced, "split", lambda out, inputs: (inputs, ForcedTokens(out)))


@pytest.mark.parametrize("with_drafts", [True, False])
def test_a_forced_text_needs_no_logits_but_for_its_end(
    checkpoint: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, with_drafts: bool
) -> None:
    core = make_core(checkpoint)
    if not with_drafts:
        core.scheduler.policies.drafter = None
    counts = count_logits(core, monkeypatch)
    found, failed = Answers(core, tokenizer).run([([5], grammar_params(WHOLE, 1))])
    expected = [*tokenizer.encode(TEXTS[2], add_special_tokens=False).ids, EOS]
    assert not failed and found[0, 0] == (expected, "stop")
    assert counts == ([2] if with_drafts else [0] * (len(expected) - 1) + [1])  # behind the end, nothing counts


def test_rows_that_want_log_probabilities_keep_their_logits(
    checkpoint: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(checkpoint)
    counts = count_logits(core, monkeypatch)
    found, _ = Answers(core, tokenizer).run([([5], grammar_params(WHOLE, 1, logprobs=1))])
    assert sum(counts) == len(found[0, 0][0]) + 1


@pytest.mark.parametrize("options", [dict(), dict(async_scheduling=True), dict(max_num_batched_tokens=40)], ids=str)
def test_the_same_answers_with_all_logits_and_fewer_of_them(
    checkpoint: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Greedy and seeded; bias, penalties, `min_tokens`, siblings, log probabilities and rows without a grammar."""
    requests = mixed()
    plain = make_core(checkpoint, **options)
    without_forced_rows(plain, monkeypatch)
    all_of_them, expected = count_logits(plain, monkeypatch), Answers(plain, tokenizer).run(requests)
    core = make_core(checkpoint, **options)
    counts, found = count_logits(core, monkeypatch), Answers(core, tokenizer).run(requests)
    assert found == expected and not found[1]
    assert sum(counts) < 0.9 * sum(all_of_them)


def test_a_step_that_raises_is_split_again(
    checkpoint: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grammars have followed the forced tokens already."""
    requests = [([5, 6, number], grammar_params(json_spec(SCHEMA), number)) for number in range(6)]
    expected = Answers(make_core(checkpoint), tokenizer).run(requests)
    core = make_core(checkpoint)
    table, raised = runner_of(core).table, list[int]()
    select = table.select

    def failing(slots: np.ndarray, *others: Any) -> Any:
        metadata = select(slots, *others)
        if len(slots) > 2:
            raised.append(len(slots))
            raise ValueError("at most two rows")
        return metadata

    monkeypatch.setattr(table, "select", failing)
    assert Answers(core, tokenizer).run(requests) == expected
    assert len(raised) > 9


@pytest.mark.parametrize("make", [make_core, make_device_core])
@pytest.mark.parametrize("error", [ValueError, Panic])
def test_a_request_whose_grammar_raises_when_it_enters_fails_alone(
    checkpoint: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, make: Any, error: type[BaseException]
) -> None:
    core = make(checkpoint)
    grammars, bad = core.info.grammars, GrammarSpec("choice", json.dumps(["x"]))
    new = grammars.new

    def failing(spec: GrammarSpec) -> Any:
        if spec == bad:
            raise error("no copy of it")
        return new(spec)

    monkeypatch.setattr(grammars, "new", failing)
    answers = Answers(core, tokenizer)
    found, failed = answers.run([([5], grammar_params(spec, 1)) for spec in (WHOLE, bad, WHOLE)])
    assert [(failure.request_id, error.__name__ in failure.message) for failure in failed] == [(1, True)]
    assert {key: answers.text(ids) for key, (ids, _) in found.items()} == {(0, 0): TEXTS[2], (2, 0): TEXTS[2]}


def test_rows_without_a_usable_token_fail_behind_what_is_forced(
    checkpoint: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forced tokens in front of it are lost with the row, whose KV cannot be trusted."""
    core = make_core(checkpoint)
    spec = GrammarSpec("regex", f"{TEXTS[0]}[0-9]{{3}}")
    sample = Sampler.__call__

    def unusable(self: Sampler, logits: torch.Tensor, metadata: Any) -> Any:
        return sample(self, torch.full_like(logits, torch.nan), metadata)

    monkeypatch.setattr(Sampler, "__call__", unusable)
    found, failed = Answers(core, tokenizer).run([([5], grammar_params(spec, 1)), ([5], grammar_params(WHOLE, 1))])
    assert {failure.message for failure in failed} == {UNUSABLE_LOGITS} and len(failed) == 2 and not found


rows_of = st.lists(
    st.tuples(
        st.sampled_from([None, *TEXTS]),
        st.integers(0, 4),  # tokens of the text that it has
        st.integers(0, 4),  # drafts that go on with it
        st.integers(0, 2),  # drafts behind these, which do not
        st.sampled_from(["samples", "samples", "samples", "prompt", "no token"]),
        st.booleans(),  # log probabilities
    ),
    min_size=1,
    max_size=5,
)


@given(drawn=rows_of, data=st.data())
def test_any_step_ends_like_one_with_all_logits(
    grammars: GuidanceGrammars, tokenizer: Tokenizer, drawn: list[Any], data: st.DataObject
) -> None:
    state = BatchState(len(drawn), 64, 16, torch.device("cpu"))
    forced_rows = ForcedRows(grammars, state)
    out, chosen, prompt = SchedulerOutput(), list[int](), 2
    for row, (text, num_taken, num_right, num_wrong, kind, wants_logprobs) in enumerate(drawn):
        slot = len(drawn) - 1 - row
        ids = tokenizer.encode(text or TEXTS[0], add_special_tokens=False).ids
        taken, drafts = ids[:num_taken], [*ids[num_taken : num_taken + num_right], *([9] * num_wrong)]
        spec = None if text is None else GrammarSpec("choice", json.dumps([text]))
        params = SamplingParams(grammar=spec, logprobs=1 if wants_logprobs else None)
        tokens = np.array([3] * prompt + taken, dtype=np.int32)
        out.new_rows.append(NewRow(slot, 1000 + row, 0, tokens.tobytes(), prompt, [], params, 0))
        grammars.forget((1000 + row, 0))
        if kind == "prompt":
            out.append(slot, 1, 0, samples=False)
            continue
        out.append(slot, 1 + len(drafts), len(tokens) - 1, samples=True)
        if drafts:
            out.draft_token_ids[row] = drafts
        # What a sampler with the grammar's mask chooses: the forced token, else anything.
        sampled = [data.draw(st.sampled_from([9, 11])) for _ in range(len(drafts) + 1)]
        for place in range(len(drafts) + 1):
            if text is not None and drafts[:place] == ids[num_taken : num_taken + place]:
                sampled[place] = ids[num_taken + place] if num_taken + place < len(ids) else EOS
        if kind == "no token" and (text is None or wants_logprobs):
            sampled[-1] = NO_TOKEN
        chosen += sampled
    state.fill_rows(out)
    forced_rows.fill_rows(out.new_rows)
    rows = np.repeat(np.arange(len(drawn)), [
        samples * count for samples, count in zip(out.samples, out.num_scheduled_tokens)
    ])  # fmt: skip
    logits = np.arange(len(rows))  # so that a place tells its token
    inputs = StepInputs(NO_TOKENS, NO_TOKENS, rows, logits, torch.empty(0), None)  # type: ignore[arg-type]
    expected = step_output(out, rows, np.array(chosen, dtype=np.int64))
    for _ in range(2):  # also when it is made again
        kept, forced = forced_rows.split(out, inputs)
        sampled_part = np.array(chosen, dtype=np.int64)[kept.logits_indices]
        found = forced.completed(step_output(forced.out, kept.row_of_logits, sampled_part))
        assert (found.token_ids, found.token_runs) == (expected.token_ids, expected.token_runs)
        assert found.row_failures == expected.row_failures
    for row, tokens in forced.tokens.items():
        start = out.num_computed_tokens[row] + 1
        assert state.token_ids[out.slots[row], start : start + len(tokens)].tolist() == tokens
