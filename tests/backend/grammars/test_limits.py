"""A grammar that explodes is the request's own fault, is found in time, and costs others nothing."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import pytest

from inflight.engine.deltas import RequestFailed
from inflight.grammars import guidance
from inflight.grammars.guidance import GuidanceGrammars
from inflight.grammars.lark_size import check_lark
from inflight.grammars.regex_size import MAX_SHORTEST_MATCH, check_regex
from inflight.grammars.spec import BEYOND_LIMITS, GrammarSpec

from .conftest import DEMO, EOS, VOCAB
from .test_answers import Answers, grammar_params
from .test_answers import answers as answers  # a fixture
from .test_guidance import DIGITS, outcome

NESTED = "(((a{1000}){1000}){1000})"


def as_schema(**schema: object) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", NESTED),
        GrammarSpec("regex", f"x|({NESTED})?"),
        as_schema(type="string", pattern=f"^{NESTED}$"),
        as_schema(items={"type": "object", "patternProperties": {NESTED: True}}),
        GrammarSpec("structural_tag", json.dumps({"format": {"type": "regex", "pattern": NESTED}})),
        GrammarSpec("grammar", f'start: "/" A "/"\nA: /{NESTED}/'),
        GrammarSpec("json_schema", "{}", NESTED),
        GrammarSpec("grammar", 'start: A\nA: ((("a"{1000}){1000}){1000})'),
        GrammarSpec("grammar", "start: d\nd: c{1000}\nc: B{1000}\nB: /a/{1000}"),  # hours, and no other thread runs
        GrammarSpec("grammar", 'root ::= "x" | [a-z]{99999}'),
    ],
    ids=lambda spec: f"{spec.kind} {spec.text[:20]}",
)
def test_a_repetition_that_no_answer_completes_is_refused_before_it_is_compiled(
    grammars: GuidanceGrammars, spec: GrammarSpec
) -> None:
    assert "matches only texts of more than 32768 characters" in outcome(grammars, spec)


@pytest.mark.parametrize(
    ("pattern", "shortest"),
    [
        ("", 0),
        ("abc", 3),
        ("a|bcd", 1),
        ("(a|bcd){4}x?y*z+", 5),
        ("(?:ab){3,9}", 6),
        ("(?P<name>ab)(?<other>c)(?i)d", 4),
        (r"\{2}\d{3}\p{L}{2}\x{41}[^\]{9}]{2}", 11),
        ("[]a]{2}", 2),
        ("^a$", 1),
        ("a{2}{3}", 6),
        ("a{0}b{0,5}(c{7})?", 0),
        ("(a(b(c){2}){2}){2}", 14),
    ],
)
def test_the_length_of_the_shortest_match(pattern: str, shortest: int) -> None:
    if shortest:
        times = MAX_SHORTEST_MATCH // shortest
        check_regex(f"({pattern}){{{times}}}", VOCAB)
        with pytest.raises(ValueError, match="more than 32768 characters"):
            check_regex(f"({pattern}){{{times + 1}}}", VOCAB)
    else:
        check_regex(f"({pattern}){{999999999}}")


@pytest.mark.parametrize(
    "piece",
    [
        *("[", "(", "\\", "{1", "(?<", r"\/", "/", '"', "[[:a:]", ")", "a{99999999999}", "|", "?"),
        *("%json {", '%json {"a":[', "a: b\n", "a[", "~", "..", "start: a a\na: start\n", " \n", "x::y(", "<[9"),
    ],
)
def test_the_check_of_a_hostile_text_takes_time_in_proportion_to_its_length(piece: str) -> None:
    """An expression that goes back over its text takes a minute here."""
    for check in (check_regex, lambda text: check_lark(text, VOCAB)):
        began = time.process_time()
        with contextlib.suppress(ValueError):
            check(piece * (65536 // len(piece)))
        assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("rules", "shortest"),
    [
        ("start: A b?\nA: /x{2}/i 'yz'\nb: A*", 4),
        ('start: "a"i ("bc" | "d"{3} A)\ni: "long text"\nA: "\\x41\\u{1F600}\\ud83d\\ude00\\n"', 3),
        ("start: A~2..9 B{2,} // c c\nA: /ab/\nB: /a+/\n%ignore /a{99}/\nc: /a{99}/", 6),
        ('start[lazy, stop="]:"]: A | start A\nA.2: "a".."z" /bc?/ & /d{99}/ | ~/e{9}/ /fgh/', 2),
        ('?start: a::0x0\n a::_: "x" a::incr(_) %if lt(_, 5)\n | "" %if eq(_, 5)', 0),
        ('start: b <tool> %json {"const": "start: x{99}"} "a" -> name\nb: "x" | b b', 2),
        ('root ::= "a" [^"]{3} name-2 # "c"\nname-2 ::= "b" | root root', 5),
        ("start: x y\ny: unknown", 0),
    ],
)  # fmt: skip
def test_the_length_of_the_shortest_answer(rules: str, shortest: int) -> None:
    if shortest:
        times = MAX_SHORTEST_MATCH // shortest
        first, becomes = ("root", "::=") if "::=" in rules else ("start", ":")
        check_lark(f"{rules}\nwhole {becomes} {first}{{{times}}}", VOCAB)
        with pytest.raises(ValueError, match="more than 32768 characters"):
            check_lark(f"{rules}\nwhole {becomes} {first}{{{times + 1}}}", VOCAB)
    else:
        check_lark(f"{rules}\nz: start{{999999}}", VOCAB)


@pytest.mark.parametrize("pattern", [".*" * 200, "(a+){1000}"], ids=["any text", "runs"])
def test_an_explosion_after_some_tokens_is_found_when_it_is_compiled(grammars: GuidanceGrammars, pattern: str) -> None:
    assert outcome(grammars, GrammarSpec("regex", pattern)).startswith(BEYOND_LIMITS)


def test_an_explosion_in_the_middle_of_an_answer_is_an_invalid_argument(answers: Answers) -> None:
    late = grammar_params(GrammarSpec("regex", "((a{1,500}){1,500}){1,500}"), 1, ignore_eos=True)
    found, failed = answers.run([([5], late), ([5], grammar_params(DIGITS, 1))])
    assert [(failure.code, failure.message[: len(BEYOND_LIMITS)]) for failure in failed] == [
        ("INVALID_ARG", BEYOND_LIMITS)
    ]
    assert isinstance(failed[0], RequestFailed) and found[1, 0][1] == "stop"


def test_a_grammar_that_waits_for_others_has_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    release, real, compiling = threading.Event(), guidance.guidance_grammar, threading.Semaphore(0)

    def slow(spec: GrammarSpec, names: dict[str, int], num_tokens: int) -> str:
        if spec.text.startswith("slow"):
            compiling.release()
            assert release.wait(60)
        return real(spec, names, num_tokens)

    monkeypatch.setattr(guidance, "guidance_grammar", slow)
    grammars = GuidanceGrammars(DEMO.read_text, VOCAB, [EOS])
    specs = [GrammarSpec("regex", f"slow{number}") for number in range(guidance._COMPILERS)]
    try:
        for spec in specs:
            grammars.start(spec)
            assert compiling.acquire(timeout=60)
        monkeypatch.setattr(guidance, "_COMPILE_SECONDS", 0.0)
        assert "was not compiled within" in (grammars.outcome(specs[0]) or "")
        assert grammars.outcome(DIGITS) is None
    finally:
        release.set()
