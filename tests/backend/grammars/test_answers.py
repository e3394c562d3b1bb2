"""Every answer of the engine that ends with "stop" is what its grammar says, whatever happens to it on the way."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from offline import make_core, make_device_core, tokens
from tokenizers import Tokenizer

from inflight.engine.core import EngineCore
from inflight.engine.deltas import RequestFailed, SequenceDelta
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.guided_sequence import GuidedSequence
from inflight.grammars.spec import GrammarSpec

from .conftest import EOS

FORMATS = jsonschema.FormatChecker(["ipv4", "uuid"])
ANSWERS = 200  # at least so many are checked

# -- schemas ---------------------------------------------------------------------------------

_SCALARS = st.one_of(
    st.builds(lambda least, more: {"type": "integer", "minimum": least, "maximum": least + more},
              st.integers(-1000, 1000), st.integers(0, 500)),
    st.builds(lambda least, more: {"type": "number", "exclusiveMinimum": least, "maximum": least + more},
              st.integers(-50, 50), st.integers(1, 90)),
    st.builds(lambda step: {"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 9_999},
              st.integers(1, 12)),
    st.builds(lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
              st.integers(0, 4), st.integers(0, 6)),
    st.sampled_from([{"type": "string", "pattern": pattern} for pattern in ("^[a-c]{2,5}$", "^x|y$", r"^\d{3}-\d$")]),
    st.sampled_from([{"type": "string", "format": name} for name in ("date", "ipv4", "uuid", "time")]),
    st.lists(st.sampled_from(["red", "ü☃", 'a "quote"', 7, -0.5, None, True, "\n"]), min_size=1, max_size=4,
             unique_by=repr).map(lambda values: {"enum": values}),
    st.sampled_from(["fixed", 3, None]).map(lambda value: {"const": value}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"], "minimum": 0, "maximum": 9}]),
)  # fmt: skip


def _object(properties: dict[str, Any], required: list[str], extra: bool) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    schema["required"] = [name for name in required if name in properties]
    if extra:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
        schema["maxProperties"] = len(properties) + 2
        schema["required"] = list(properties)
    return schema


_NAMES = st.sampled_from(["name", "id", "a b", "ß", 'q"', "list"])
_SCHEMAS = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(_NAMES, inner, max_size=3), st.lists(_NAMES, max_size=3, unique=True),
                  st.booleans()),
        st.builds(lambda items, least, more: {"type": "array", "items": items, "minItems": least,
                                              "maxItems": least + more},
                  inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)},
                  st.lists(inner, min_size=1, max_size=2)),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        inner.map(lambda part: {"$defs": {"part": part}, "type": "array", "items": {"$ref": "#/$defs/part"},
                                "maxItems": 2}),
    ),
    max_leaves=5,
)  # fmt: skip


def _refs_stand_alone(schema: Any, top: bool = True) -> bool:
    """`$ref` here means the whole schema's `$defs`, so only the outermost one may have some."""
    if isinstance(schema, dict):
        return ("$defs" not in schema or top) and all(_refs_stand_alone(part, False) for part in schema.values())
    return not isinstance(schema, list) or all(_refs_stand_alone(part, False) for part in schema)


# -- running ---------------------------------------------------------------------------------


class Answers:
    """Runs requests on one core."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self.core, self.tokenizer = core, tokenizer
        self._next_id = 0

    def run(self, requests: list[tuple[list[int], SamplingParams]], **fields: Any) -> tuple[dict, list[RequestFailed]]:
        """(request, index) -> (token ids, finish reason); requests that failed."""
        first, self._next_id = self._next_id, self._next_id + len(requests)
        deltas: dict[tuple[int, int], list[SequenceDelta]] = {}
        failed = []
        for number, (prompt, params) in enumerate(requests):
            refusal = self.core.add_request(AddRequest(first + number, prompt, params, **fields))
            assert refusal is None, refusal
        while self.core.has_work:
            message = self.core.step()
            failed += message.failed
            for delta in message.deltas:
                deltas.setdefault((delta.request_id - first, delta.index), []).append(delta)
        check_core(self.core)
        return {key: (tokens(found), found[-1].finish_reason) for key, found in deltas.items()}, failed

    def text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode([token for token in token_ids if token != EOS], skip_special_tokens=False)


@pytest.fixture(scope="module")
def answers(checkpoint: str, tokenizer: Tokenizer) -> Answers:
    return Answers(make_core(checkpoint, max_num_seqs=32), tokenizer)


def grammar_params(spec: GrammarSpec, seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"grammar": spec, "seed": seed, "temperature": 1.0, "max_tokens": 160, **options})


def json_spec(schema: Any, whitespace: str | None = "") -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), whitespace)


# -- tests -----------------------------------------------------------------------------------


def test_every_json_answer_validates(answers: Answers) -> None:
    checked = 0

    @given(st.lists(_SCHEMAS.filter(_refs_stand_alone), min_size=8, max_size=8), st.integers(0, 2**30))
    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    def check(schemas: list[dict[str, Any]], seed: int) -> None:
        nonlocal checked
        prompt = [7, 8, 9]
        requests = [
            (prompt, grammar_params(json_spec(schema, whitespace), seed + number, n=2))
            for number, schema in enumerate(schemas)
            for whitespace in ("", r"[ \n]{1,2}")
        ]
        found, failed = answers.run(requests)
        for failure in failed:  # llguidance proves some schemas to have no answer
            assert failure.code == "INVALID_ARG" and "nsatisfiable" in failure.message
        for (number, _), (token_ids, reason) in found.items():
            if reason == "stop":
                text = answers.text(token_ids)
                jsonschema.validate(
                    json.loads(text),
                    schemas[number // 2],
                    format_checker=jsonschema.FormatChecker(["ipv4", "uuid"]),
                )
                checked += 1

    check()
    assert checked >= ANSWERS


def test_every_regex_and_choice_answer_matches(answers: Answers) -> None:
    patterns = [
        r"[a-z]{1,5}@[a-z]{2,4}\.(com|org)",
        r"(ab|cd)+?x{0,3}",
        r"\d{4}-(0[1-9]|1[0-2])",
        "[^abc]{3}",
        "(?i)yes|no",
        "ü{2,3}☃?",
    ]
    choices = ["yes", "no", "maybe", "a\nb", 'quoted "text"', "日本", "yes and no"]
    requests = [
        ([5], grammar_params(GrammarSpec("regex", pattern), seed, n=2, max_tokens=60))
        for pattern in patterns
        for seed in range(8)
    ]
    requests += [([5], grammar_params(GrammarSpec("choice", json.dumps(choices)), seed)) for seed in range(40)]
    found, failed = answers.run(requests)
    assert not failed and len(found) == len(patterns) * 16 + 40
    for (number, _), (token_ids, reason) in found.items():
        text = answers.text(token_ids)
        if number >= len(patterns) * 8:
            assert text in choices and reason == "stop" and token_ids[-1] == EOS
        elif reason == "stop":
            assert re.fullmatch(patterns[number // 8], text), text
    assert len({answers.text(ids) for (n, _), (ids, _) in found.items() if n >= len(patterns) * 8}) > 2


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Oslo", "Rome"]},
        "degrees": {"type": "integer", "minimum": -40, "maximum": 50},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["city", "degrees", "words"],
    "additionalProperties": False,
}


def mixed() -> list[tuple[list[int], SamplingParams]]:
    """With and without a grammar, side by side; all rules meet it."""
    options = [
        dict(temperature=0.0),
        dict(top_k=20, repetition_penalty=1.3, presence_penalty=0.5),
        dict(logit_bias={100: 5.0}, bad_words_ids=[[9], [11, 12]]),
        dict(min_tokens=50, ignore_eos=True),
        dict(logprobs=3),
        dict(n=3, top_p=0.9),
        dict(temperature=1.5, min_p=0.01),
        dict(allowed_token_ids=[40, 41, 42]),
    ]
    rng = random.Random(3)
    return [
        (
            [rng.randrange(2, 2000) for _ in range(rng.randrange(3, 60))],
            SamplingParams(
                **{
                    "seed": number,
                    "max_tokens": 70,
                    "grammar": json_spec(SCHEMA) if number % 2 else None,
                    **options[number // 2 % len(options)],
                }
            ),
        )
        for number in range(16)
    ]


def test_the_same_tokens_alone_in_any_batch_and_after_preemption(
    checkpoint: str, tokenizer: Tokenizer, answers: Answers
) -> None:
    requests = mixed()
    expected, failed = answers.run(requests)
    assert not failed
    for (number, _), (token_ids, reason) in expected.items():
        if requests[number][1].grammar is not None and reason == "stop":
            jsonschema.validate(json.loads(answers.text(token_ids)), SCHEMA)
            assert token_ids.index(EOS) == len(token_ids) - 1
    stopped = [key for key, (_, reason) in expected.items() if reason == "stop" and key[0] % 2]
    assert len(stopped) > 5
    cores = {
        "little memory": make_core(
            checkpoint, block_size=4, num_gpu_blocks_override=80, max_num_batched_tokens=40, max_model_len=256
        ),
        "swapped, ahead": make_core(
            checkpoint,
            block_size=4,
            num_gpu_blocks_override=80,
            max_model_len=256,
            async_scheduling=True,
            swap_space="1MiB",
            preemption_mode="swap",
        ),
        "on a device": make_device_core(checkpoint, max_num_seqs=7),
    }
    without_drafts = make_core(checkpoint, max_num_seqs=32)
    without_drafts.scheduler.policies.drafter = None
    cores["no forced tokens"] = without_drafts
    for name, core in cores.items():
        found, failed = Answers(core, tokenizer).run(requests)
        assert not failed and found == expected, name
        if core.config.num_gpu_blocks_override:
            assert core.scheduler.num_preempted_total > 3, name
    alone = Answers(make_core(checkpoint, enable_prefix_caching=False), tokenizer)
    for number in (1, 3, 5, 7, 9, 11, 15):
        found, _ = alone.run([requests[number]])
        assert {key[1]: value for key, value in found.items()} == {
            key[1]: value for key, value in expected.items() if key[0] == number
        }


def test_it_goes_on_from_any_cut(checkpoint: str, tokenizer: Tokenizer, answers: Answers) -> None:
    params = grammar_params(json_spec(SCHEMA), 4, n=2)
    found, _ = answers.run([([5, 6], params)])
    whole = [found[0, index][0] for index in range(2)]
    for cut in range(0, min(map(len, whole)), 3):
        again, failed = answers.run([([5, 6], params)], output_token_ids=[ids[:cut] for ids in whole])
        assert not failed
        assert [ids[:cut] + again[0, index][0] for index, ids in enumerate(whole)] == whole
    ended, _ = answers.run([([5, 6], params)], output_token_ids=[None, whole[1][:2]])
    assert whole[1][:2] + ended[0, 1][0] == whole[1] and (0, 0) not in ended


def test_output_that_the_grammar_does_not_allow_fails_that_request_alone(
    answers: Answers, tokenizer: Tokenizer
) -> None:
    core = answers.core
    wrong = tokenizer.encode("not JSON").ids
    assert (
        core.add_request(AddRequest(10_001, [5], grammar_params(json_spec(SCHEMA), 1), output_token_ids=[wrong]))
        is None
    )
    good, failed = answers.run([([5], grammar_params(json_spec(SCHEMA), 1))])
    assert good[0, 0][1] == "stop"
    assert [(failure.request_id, failure.code) for failure in failed] == [(10_001, "INTERNAL")]
    assert "the grammar cannot go on: it does not allow token" in failed[0].message


def test_a_grammar_that_is_refused_fails_its_request_alone_and_nothing_waits(answers: Answers) -> None:
    bad = grammar_params(GrammarSpec("regex", "(?=a)b"), 1)
    found, failed = answers.run([([5], bad), ([5], grammar_params(json_spec(SCHEMA), 1)), ([6], SamplingParams(n=2))])
    assert [(failure.code, "look-around" in failure.message) for failure in failed] == [("INVALID_ARG", True)]
    assert {number for number, _ in found} == {1, 2}


def test_forced_tokens_take_fewer_steps(checkpoint: str, tokenizer: Tokenizer, answers: Answers) -> None:
    spec = GrammarSpec("choice", json.dumps(["a long text that has no other way to go on from its first word"]))
    core = make_core(checkpoint)
    core.add_request(AddRequest(1, [5], grammar_params(spec, 1)))
    rows = 0
    while core.has_work:
        rows += core.step().stats.batch_size
    assert rows == 1  # the first token is forced, too


def test_every_token_is_parsed_once(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter and the logits rule follow a sequence together."""
    parsed: list[int] = []
    advance = GuidedSequence.advance

    def counting(sequence: Any, token_ids: Any) -> None:
        parsed.extend(token_ids)
        advance(sequence, token_ids)

    monkeypatch.setattr(GuidedSequence, "advance", counting)
    found, _ = answers.run([([5], grammar_params(json_spec(SCHEMA), seed, n=2)) for seed in range(3)])
    assert 0 < len(parsed) <= sum(len(token_ids) for token_ids, _ in found.values())


def test_the_id_of_an_ended_request_can_come_again(checkpoint: str) -> None:
    core = make_core(checkpoint)
    for text in ("one", "another"):
        spec = GrammarSpec("choice", json.dumps([text]))
        assert core.add_request(AddRequest(1, [5], grammar_params(spec, 1))) is None
        while core.has_work:
            assert not core.step().failed


def test_max_tokens_cuts_with_length(answers: Answers) -> None:
    found, _ = answers.run([([5], grammar_params(json_spec(SCHEMA), 1, max_tokens=3))])
    assert found[0, 0][1] == "length" and len(found[0, 0][0]) == 3


def test_log_probabilities_are_those_of_what_the_mask_leaves(answers: Answers) -> None:
    spec = GrammarSpec("choice", json.dumps(["a", "b"]))
    core = answers.core
    core.add_request(AddRequest(20_000, [5], grammar_params(spec, 2, logprobs=4, max_tokens=1)))
    entries = []
    while core.has_work:
        entries += [entry for delta in core.step().deltas for entry in delta.logprobs or []]
    (entry,) = entries
    finite = {token: value for token, value, _ in entry if value > -1000}
    assert len(finite) == 2 and abs(sum(2.718281828459045**value for value in finite.values()) - 1) < 1e-5
