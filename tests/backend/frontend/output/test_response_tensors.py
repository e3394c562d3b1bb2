"""One sequence's text, stop strings and counts: in runs of tokens, and continued from given output."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from frontend_rig import demo_tokenizer, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.engine.deltas import SequenceDelta
from inflight.engine.logprobs import Logprobs
from inflight.frontend.output import response_tensors as outputs
from inflight.frontend.output.response_tensors import SequenceOutput, sequence_outputs

TOKENIZER = demo_tokenizer()
PROMPT = TOKENIZER.encode("Return 你", add_special_tokens=False)
TEXT = " the naïve 你好 😀 list of names, thé 👩‍👩‍👧 end of it"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False)
STOPS = [["好 😀 l"], ["names", "end of it"], ["👩‍👧"], [" of names!", "zz"], [" the"]]


def sequence(tokens: list[int] | None = (), logprob: float = 0.0, prepend: str = "", **params) -> SequenceOutput:
    fields = {"output_token_ids": [None if tokens is None else list(tokens)]}
    returns = ["return_logprobs"]
    request = make_request(
        PROMPT, returns=returns, prepend_text=prepend, fields=fields, cumulative_logprobs=[logprob], **params
    )
    return SequenceOutput(request, TOKENIZER)


def feed(output: SequenceOutput, ids: list[int], runs: Iterator[int] | None = None) -> None:
    """Deltas of one token each, or of as many as `runs` says."""
    start = 0
    while start < len(ids):
        end = start + (next(runs, 1) if runs else 1)
        run = ids[start:end]
        logprobs = Logprobs.of([(token, -1.0, 1)] for token in run)
        output.advance(SequenceDelta(1, 0, run, "length" if end >= len(ids) else None, None, logprobs))
        start = end


def state(output: SequenceOutput) -> tuple:
    return output.finish_reason, output.stop_reason, output.num_tokens, output.cumulative_logprob


def check_every_cut(ids: list[int], **params) -> None:
    whole = sequence(**params)
    feed(whole, ids)
    before = sequence(**params)
    for cut in range(len(ids)):
        if before.ended:
            break
        rest = sequence(ids[:cut], logprob=-float(cut), **params)
        assert (rest.text, rest.new_token_ids, rest.new_logprobs) == ("", [], []), "what was given is not sent again"
        assert (rest.num_tokens, rest.num_generated_tokens) == (cut, 0)
        feed(rest, ids[cut:])
        assert before.text + rest.text == whole.text, f"cut at {cut}"
        assert before.new_token_ids + rest.new_token_ids == whole.new_token_ids
        assert before.new_logprobs + rest.new_logprobs == whole.new_logprobs
        assert state(rest) == state(whole)
        before.advance(SequenceDelta(1, 0, [ids[cut]], None, None, Logprobs.of([[(ids[cut], -1.0, 1)]])))


@pytest.mark.parametrize("stop", [[], *STOPS])
def test_continued_from_any_point_the_output_is_the_rest_of_the_whole(stop: list[str]) -> None:
    for min_tokens, include in product((0, 20), (False, True)):
        options = {"stop": stop, "min_tokens": min_tokens, "include_stop_str_in_output": include}
        check_every_cut(IDS, logprobs=0, max_tokens=99, **options)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, TOKENIZER.size - 1), max_size=25), stop=st.booleans())
def test_random_tokens_continue_the_same(ids: list[int], stop: bool) -> None:
    """A random model's output is seldom valid UTF-8, and has special tokens inside."""
    check_every_cut(ids, stop=["e", "\ufffd\ufffd"] if stop else [], logprobs=0)


@settings(max_examples=60, deadline=None)
@given(stop=st.sampled_from(STOPS), sizes=st.lists(st.integers(1, 7), min_size=40, max_size=40), cut=st.integers(0, 9))
def test_runs_of_tokens_give_the_same_output(stop: list[str], sizes: list[int], cut: int) -> None:
    """Accepted drafts come several at once; a stop string inside a run ends the output there."""
    single, runs = (sequence(IDS[:cut], stop=stop, max_tokens=99, logprobs=0) for _ in range(2))
    feed(single, IDS[cut:])
    feed(runs, IDS[cut:], iter(sizes))
    assert (runs.text, runs.new_token_ids, runs.new_logprobs) == (
        single.text,
        single.new_token_ids,
        single.new_logprobs,
    )
    assert state(runs) == state(single)


def test_a_stop_token_at_the_end_of_a_run_counts_but_is_not_shown() -> None:
    for include, shown in ((False, IDS[:2]), (True, IDS[:3])):
        output = sequence(include_stop_str_in_output=include)
        output.advance(SequenceDelta(1, 0, IDS[:3], "stop", IDS[2]))
        assert output.text == TOKENIZER.decode(PROMPT + shown).removeprefix(TOKENIZER.decode(PROMPT))
        assert (output.num_tokens, output.stop_reason) == (3, IDS[2])


def test_the_prompt_is_prepended_to_what_follows_the_given_output() -> None:
    output = sequence(IDS[:2], prepend="Return 你")
    output.advance(SequenceDelta(1, 0, [IDS[2]]))
    assert output.text == "Return 你" + TOKENIZER.decode(PROMPT + IDS[:3]).removeprefix(
        TOKENIZER.decode(PROMPT + IDS[:2])
    )


def test_a_sequence_that_ended_before_takes_nothing() -> None:
    output = sequence(None, logprob=-3.0)
    output.advance(SequenceDelta(1, 0, IDS))
    assert output.ended and output.finish_reason is None
    assert (output.text, output.num_tokens, output.cumulative_logprob) == ("", 0, -3.0)


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, TOKENIZER.size - 1), min_size=65, max_size=160),
    rest=st.lists(st.integers(0, TOKENIZER.size - 1), max_size=9),
    special=st.booleans(),
)
def test_a_long_given_output_leaves_the_same_state_as_token_by_token(
    ids: list[int], rest: list[int], special: bool
) -> None:
    options = {"skip_special_tokens": special, "max_tokens": 999}
    at_once = sequence(ids, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "_RECENT_TOKENS", 10**6)
        one_by_one = sequence(ids, **options)
    for output in (at_once, one_by_one):
        feed(output, rest)
    assert (at_once.text, state(at_once)) == (one_by_one.text, state(one_by_one))
    assert at_once.token_ids == one_by_one.token_ids


def test_sequences_share_what_is_prepared_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of the prompt's end is decoded once, and the stop strings are compiled once, whatever n is."""
    made: list[str] = []
    for name in ("IncrementalDetokenizer", "StopStrings"):
        wanted = getattr(outputs, name)
        monkeypatch.setattr(outputs, name, lambda *args, wanted=wanted, name=name: made.append(name) or wanted(*args))
    request = make_request(PROMPT, n=3, stop=[" of names!", "zz"], max_tokens=99)
    one, two, three = sequence_outputs(request, TOKENIZER)
    assert sorted(made) == ["IncrementalDetokenizer", "StopStrings"]
    feed(one, IDS[:4])  # ends with "length"
    feed(two, IDS)
    feed(three, IDS[:-1])
    alone = sequence(stop=[" of names!", "zz"], max_tokens=99)
    feed(alone, IDS)
    assert two.text == alone.text == TEXT.replace("\ufffd", "")
    assert TEXT.startswith(one.text[:-1]) and one.text != three.text != two.text
