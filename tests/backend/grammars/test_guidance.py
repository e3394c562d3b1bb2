"""Grammars of llguidance: compiled once, refused by name, masks that agree with the automaton."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from inflight.grammars import guidance
from inflight.grammars.base import Grammar, MaskJob, mask_words
from inflight.grammars.guidance import GuidanceGrammars
from inflight.grammars.spec import BEYOND_LIMITS, GrammarSpec
from inflight.grammars.vocabulary import Vocabulary

from .conftest import DEMO, EOS, VOCAB

DIGITS = GrammarSpec("regex", "[0-9]{1,6}")
SCHEMA = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}), "")


def outcome(grammars: GuidanceGrammars, spec: GrammarSpec) -> str:
    """Once it is known."""
    deadline = time.monotonic() + 60
    while (found := grammars.outcome(spec)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def allowed(grammars: GuidanceGrammars, *jobs: MaskJob, rows: int = 1, in_background: bool = True) -> list[set[int]]:
    bitmask = np.empty((rows, mask_words(VOCAB)), dtype=np.int32)
    grammars.fill(jobs, bitmask, in_background)
    bits = np.unpackbits(bitmask.view(np.uint8), axis=1, count=VOCAB, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def allows(sequence: Grammar, drafts: list[int], tokens: list[int]) -> bool:
    """Whether the tokens are left as they are, without a mask."""
    tokens = tokens[: len(drafts) + 1]
    settled = list(tokens)
    return sequence.settle(drafts, settled, [True] * len(tokens)) == len(tokens) and settled == tokens


def refused(**schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("regex", "(?=a)b"), "look-around"),
        (GrammarSpec("regex", r"(a)\1"), "backreferences are not supported"),
        (GrammarSpec("regex", "(a"), "unclosed group"),
        (refused(type="strin"), "strin"),
        (refused(**{"not": {"type": "string"}}), '"not"'),
        (refused(type="array", uniqueItems=True), "uniqueItems"),
        (refused(type="array", contains={"type": "integer"}), "contains"),
        (refused(**{"if": {"type": "string"}, "then": {"minLength": 2}}), '"if"'),
        (refused(type="object", propertyNames={"pattern": "^a"}), "propertyNames"),
        (refused(type="object", dependentRequired={"a": ["b"]}), "dependentRequired"),
        (refused(oneOf=[{"type": "integer"}, {"type": "number"}]), "oneOf"),
        (refused(type="string", format="phone"), "phone"),
        (refused(**{"$ref": "https://example.com/schema"}), "example.com"),
        (refused(**{"x-guidance": {"lenient": True}, "not": {}}), "x-guidance is not supported"),
        (refused(properties={"a": {"x-guidance": {"lenient": True}}}), "x-guidance is not supported"),
        (refused(type="object", minProperties=3), "minProperties=3 is not supported"),
        (refused(**{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), ""),
        (GrammarSpec("json_schema", "false"), "must be an object, or true"),
        (GrammarSpec("grammar", "start: nothing"), "nothing"),
        (GrammarSpec("grammar", "root ::= missing"), "missing"),
        (GrammarSpec("structural_tag", '{"type": "structural_tag"}'), "structural_tag: must be"),
        (GrammarSpec("structural_tag", '{"format": {"type": "qwen_xml"}}'), "'qwen_xml' is not supported"),
        (GrammarSpec("structural_tag", '{"structures": [], "triggers": ["<"]}'), "no tag begins with the trigger '<'"),
    ],
    ids=lambda value: value.text[:40] if isinstance(value, GrammarSpec) else value,
)
def test_what_cannot_be_enforced_is_refused_by_name(grammars: GuidanceGrammars, spec: GrammarSpec, reason: str) -> None:
    found = outcome(grammars, spec)
    assert found and reason in found
    assert len(found) <= 600 and "<state>" not in found
    with pytest.raises(ValueError):
        grammars.new(spec)


def test_a_grammar_is_compiled_once_and_the_oldest_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GrammarSpec] = []
    real = guidance.guidance_grammar

    def counting(spec: GrammarSpec, names: dict[str, int], num_tokens: int) -> str:
        seen.append(spec)
        return real(spec, names, num_tokens)

    monkeypatch.setattr(guidance, "guidance_grammar", counting)
    monkeypatch.setattr(guidance, "_MAX_CACHED", 3)
    grammars = GuidanceGrammars(DEMO.read_text, VOCAB, [EOS])
    specs = [GrammarSpec("regex", f"a{{{count}}}") for count in range(1, 5)]
    for spec in [*specs[:3], *specs[:3]]:
        assert outcome(grammars, GrammarSpec(spec.kind, spec.text)) == ""
    assert seen == specs[:3]
    first = grammars.new(specs[0])  # the most recent one now
    for spec in specs[3:]:
        assert outcome(grammars, spec) == ""
    first.advance([])
    assert outcome(grammars, specs[0]) == "" and len(seen) == 4
    assert outcome(grammars, specs[1]) == "" and len(seen) == 5, "the oldest was forgotten, and is compiled again"


def test_sources_are_bounded_in_size_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "_MAX_CACHED_BYTES", 100)
    grammars = GuidanceGrammars(DEMO.read_text, VOCAB, [EOS])
    for size in (60, 70, 300):
        assert outcome(grammars, GrammarSpec("regex", "b" * size)) == ""
    assert len(grammars._entries) == 1 and grammars._num_bytes == 300


def test_one_that_takes_too_long_fails_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:

    begun, release, real = threading.Event(), threading.Event(), guidance.guidance_grammar

    def slow(spec: GrammarSpec, names: dict[str, int], num_tokens: int) -> str:
        if spec.text == "slow":
            begun.set()
            release.wait()
        return real(spec, names, num_tokens)

    monkeypatch.setattr(guidance, "guidance_grammar", slow)
    monkeypatch.setattr(guidance, "_COMPILE_SECONDS", float("inf"))
    grammars = GuidanceGrammars(DEMO.read_text, VOCAB, [EOS])
    spec = GrammarSpec("regex", "slow")
    try:
        assert grammars.outcome(spec) is None
        assert outcome(grammars, DIGITS) == ""
        begun.wait()
        assert grammars.outcome(spec) is None
        monkeypatch.setattr(guidance, "_COMPILE_SECONDS", 0.0)
        assert "was not compiled within" in (grammars.outcome(spec) or "")
    finally:
        release.set()


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "((a{1,500}){1,500}){1,500}"),
        GrammarSpec("regex", r"(\p{L}{1,1000}){1,1000}"),
        GrammarSpec("regex", ".*a.{30}" * 20),
        refused(enum=[f"value-{number}" for number in range(8000)]),
        GrammarSpec("json_schema", '{"items":' * 500 + "{}" + "}" * 500),
        refused(type="object", properties={f"p{number}": {"type": "string"} for number in range(1500)}),
        refused(
            allOf=[
                {"anyOf": [{"properties": {f"x{one}{other}": {"type": "integer"}}} for other in range(6)]}
                for one in range(8)
            ]
        ),
        refused(type="array", minItems=100_000, items={"type": "array", "minItems": 100_000}),
        GrammarSpec("grammar", 'start: x\nx: x x | "a" |'),
        GrammarSpec("grammar", "start: " + '"a" ' * 20_000),
        GrammarSpec("grammar", "root ::= " + "(" * 2000 + '"a"' + ")" * 2000),
        GrammarSpec("choice", json.dumps(["x" * 100_000])),
    ],
    ids=lambda spec: f"{spec.kind} {spec.text[:20]}",
)
def test_a_hostile_grammar_is_refused_or_walked_within_bounds(grammars: GuidanceGrammars, spec: GrammarSpec) -> None:
    if outcome(grammars, spec):
        return
    sequence = grammars.new(spec)
    for _ in range(12):
        (tokens,) = allowed(grammars, MaskJob(sequence, 0, []))
        if sequence.error or tokens == {EOS}:
            break
        sequence.advance([max(tokens - {EOS})])
    assert not sequence.error or sequence.error.startswith(BEYOND_LIMITS)


@pytest.mark.parametrize("seconds", [0.0, 10.0, None])
def test_masks_of_drafts_are_those_of_the_same_tokens_taken_one_by_one(
    grammars: GuidanceGrammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    """By this thread, by others, and in the background."""
    monkeypatch.setattr(guidance, "_SERIAL_SECONDS", seconds)
    texts = ['{"a":-10}', '{"a":1', '{"a":"x"', "", '{"b":[1,{"c":null}]', "nothing like JSON", '{"a":1}']

    @given(st.sampled_from(texts), st.integers(0, 6), st.sampled_from([SCHEMA, DIGITS]))
    @settings(max_examples=80, deadline=None)
    def check(text: str, cut: int, spec: GrammarSpec) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        taken, drafts = ids[:cut], ids[cut:]
        sequence, one = grammars.new(spec), grammars.new(spec)
        sequence.advance(taken)
        one.advance(taken)
        masks = allowed(grammars, MaskJob(sequence, 1, drafts), rows=len(drafts) + 2, in_background=seconds is None)
        assert len(masks[0]) == VOCAB, "a row without a job allows all"
        everything = set(range(VOCAB))
        for row, draft in enumerate([*drafts, None], 1):
            expected = everything if one.error else allowed(grammars, MaskJob(one, 0, []))[0]
            assert masks[row] == expected
            if draft is None or one.error:
                break
            if draft not in expected:
                assert all(mask == everything for mask in masks[row + 1 :])
                break
            one.advance([draft])
        assert allowed(grammars, MaskJob(sequence, 0, []))[0] == masks[1], "drafts leave it where it is"

    check()


def test_a_token_is_allowed_exactly_where_a_mask_allows_it(grammars: GuidanceGrammars, tokenizer: Tokenizer) -> None:
    words = GrammarSpec("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2}')
    walks = [(SCHEMA, '{"a":-10}'), (DIGITS, "123456"), (words, '["né","☃☃☃"]'), (words, '["'), (SCHEMA, "x")]
    for spec, text in walks:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        sequence = grammars.new(spec)
        for token in [*ids, EOS]:
            (tokens,) = allowed(grammars, MaskJob(sequence, 0, []))
            if sequence.error:
                assert not allows(sequence, [], [token])
                break
            found = {one for one in range(VOCAB) if allows(sequence, [], [one])}
            assert found == tokens or (tokens == {EOS} and not found), "behind the end only the mask tells"
            sequence.advance([token])
        again = grammars.new(spec)
        masks = allowed(grammars, MaskJob(again, 0, ids), rows=len(ids) + 1)
        for wrong in range(len(ids) + 1):
            for other in (5, 300, EOS):
                chosen = [*ids[:wrong], other, *[7] * (len(ids) - wrong)]
                good = all(chosen[i] in masks[i] for i in range(wrong + 1))
                if wrong < len(ids) and other == ids[wrong]:
                    continue
                found_good = allows(again, ids, chosen)
                assert found_good == good or masks[wrong] == {EOS}, "what follows another token does not count"


@given(st.data())
def test_questions_do_not_move_a_sequence(grammars: GuidanceGrammars, data: Any) -> None:
    """A token that `settle` finds allowed is kept consumed, and taken back if another one follows."""
    spec = data.draw(st.sampled_from([SCHEMA, DIGITS, GrammarSpec("json_schema", '{"type": "array"}')]))
    sequence, taken = grammars.new(spec), list[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        fresh = grammars.new(spec)
        fresh.advance(taken)
        (possible,) = allowed(grammars, MaskJob(fresh, 0, []))
        tokens = data.draw(st.lists(st.sampled_from([*sorted(possible)[:20], 5, EOS]), min_size=2, max_size=2))
        match data.draw(st.sampled_from(["allows", "allows", "drafts", "mask", "forced", "num_allowed", "advance"])):
            case "allows":
                assert allows(sequence, [], tokens) == (tokens[0] in possible) or possible == {EOS}
            case "drafts":
                assert allows(sequence, tokens[:1], tokens) == allows(fresh, tokens[:1], tokens)
            case "mask":
                jobs = [[MaskJob(walk, 0, tokens[:1])] for walk in (sequence, fresh)]
                assert allowed(grammars, *jobs[0], rows=2) == allowed(grammars, *jobs[1], rows=2)
            case "forced":
                assert sequence.forced(8) == fresh.forced(8)
            case "num_allowed":
                assert sequence.num_allowed(tokens) == fresh.num_allowed(tokens)
            case "advance":
                sequence.advance(tokens[:1])
                taken += tokens[:1]
                assert sequence.num_tokens == len(taken)
                if tokens[0] not in possible:
                    assert sequence.error.startswith("the grammar cannot go on")
                    return
                if tokens[0] == EOS:
                    return


def test_a_token_that_the_grammar_does_not_allow_ends_the_sequence_with_a_reason(
    grammars: GuidanceGrammars, tokenizer: Tokenizer
) -> None:
    sequence = grammars.new(DIGITS)
    sequence.advance(tokenizer.encode("x", add_special_tokens=False).ids)
    assert sequence.error.startswith("the grammar cannot go on")
    assert allowed(grammars, MaskJob(sequence, 0, [])) == [set(range(VOCAB))]
    assert sequence.forced(5) == []


def test_a_long_literal_is_encoded_piece_by_piece_as_the_tokenizer_would(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token has what is left encoded: without a bound, 100,000 characters take 0.3 s."""
    lengths, real = [], guidance.read_vocabulary

    def counted(text: str) -> Vocabulary:
        vocabulary = real(text)
        encode = vocabulary.encode
        return replace(vocabulary, encode=lambda text: lengths.append(len(text)) or encode(text))

    monkeypatch.setattr(guidance, "read_vocabulary", counted)
    grammars = GuidanceGrammars(DEMO.read_text, VOCAB, [EOS])
    literal = " ".join(f"prénom {number}" for number in range(150))
    sequence = grammars.new(GrammarSpec("choice", json.dumps([literal])))
    taken: list[int] = []
    while forced := sequence.forced(10_000):
        sequence.advance(forced)
        taken += forced
    assert taken == [*tokenizer.encode(literal, add_special_tokens=False).ids, EOS]
    assert max(lengths) <= guidance._MAX_ENCODED_LENGTH


def test_what_is_forced_is_what_masks_allow_and_ends_with_the_grammar(
    grammars: GuidanceGrammars, tokenizer: Tokenizer
) -> None:
    spec = GrammarSpec("choice", json.dumps(["one and only"]))
    sequence = grammars.new(spec)
    forced = sequence.forced(100)
    assert tokenizer.decode(forced[:-1]) == "one and only" and forced[-1] == EOS
    assert sequence.forced(2) == forced[:2]
    for token in forced:
        (tokens,) = allowed(grammars, MaskJob(sequence, 0, []))
        assert token in tokens
        sequence.advance([token])
    assert not sequence.error
    assert grammars.new(GrammarSpec("choice", '["a","b"]')).forced(9) == []


def test_where_one_token_is_allowed_it_is_settled_without_a_mask(
    grammars: GuidanceGrammars, tokenizer: Tokenizer
) -> None:
    """Also if the model would spell the forced text differently: a mask would not let it."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "kind": {"enum": ["bk", "fm"]}},
    }
    schema |= {"required": ["name", "kind"], "additionalProperties": False}
    spec = GrammarSpec("json_schema", json.dumps(schema), "")
    sequence, fresh, places = grammars.new(spec), grammars.new(spec), 0
    taken: list[int] = []
    for token in [*tokenizer.encode('{"name":"abc","kind":"bk"}', add_special_tokens=False).ids, EOS]:
        (possible,) = allowed(grammars, MaskJob(fresh, 0, []))
        run = fresh.forced(20)
        for wrong in [one for one in range(1, VOCAB) if fresh.num_allowed([one])]:
            chosen = [wrong]
            assert sequence.settle([], chosen, [False]) == (len(possible) == 1 and possible != {EOS})
            assert chosen == ([*possible] if run and run != [EOS] else [wrong])
            places += bool(run) and wrong != run[0]
        if EOS not in run and run:  # all of the run, and the mask behind it alone
            chosen = [7] * (len(run) + 1)
            settled = sequence.settle(run, chosen, [False] * len(chosen))
            assert chosen[: len(run)] == run
            one = grammars.new(spec)
            one.advance([*taken, *run])
            if settled == len(run):
                late = allowed(grammars, MaskJob(sequence, 0, run[settled:], run[:settled]))
                assert late == allowed(grammars, MaskJob(one, 0, []))
        for walk in (sequence, fresh):
            walk.advance([token])
            assert not walk.error
        taken.append(token)
    assert places, "some forced text has several spellings"
