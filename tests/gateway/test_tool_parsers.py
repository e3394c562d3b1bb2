"""Calls of tools in answers: what each format's parser finds, however the answer is cut."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inflight_gateway.tool_parsers import FORMATS, CallArguments, CallEnd, CallStart, Content, format_named, new_parser

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
            "place": {"$ref": "#/$defs/place"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "kind": {"enum": [1, "b"]},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
}
Joined = tuple[str, list[tuple[str, str]]]


def parsed(format: str, pieces: Iterable[str], cut: bool = False) -> Joined:
    """Joins the events and checks their order."""
    parser = new_parser(format, TOOLS)
    content, calls, ids, open_call = "", [], set(), False
    for event in itertools.chain(*(parser.feed(piece) for piece in pieces), parser.finish(cut)):
        if isinstance(event, Content):
            assert not open_call and event.text
            content += event.text
        elif isinstance(event, CallStart):
            assert not open_call and event.index == len(calls) and event.name
            open_call = True
            ids.add(event.id)
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            assert open_call and event.index == len(calls) - 1 and event.text
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
        else:
            assert isinstance(event, CallEnd) and open_call and event.index == len(calls) - 1
            open_call = False
    assert not open_call and len(ids) == len(calls)
    return content, calls


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(name: str, **values: str) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


OSLO = '{"city": "Oslo", "days": 3}'
FAKE = '{"city": "</tool_call>]; {\\"[TOOL_CALLS]<|python_tag|>\\\\", "days": [1, {"a": "}"}]}'
CASES: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        ("It is sunny.\n", "It is sunny.\n", []),
        ("", "", []),
        (hermes("weather", OSLO), "", [("weather", OSLO)]),
        ("Let me look.\n" + hermes("weather", FAKE), "Let me look.", [("weather", FAKE)]),
        (hermes("weather", OSLO) + "\n" + hermes("now", "{}"), "", [("weather", OSLO), ("now", "{}")]),
        (hermes("weather", OSLO) + " Wait. " + hermes("now", "{}"), " Wait.", [("weather", OSLO), ("now", "{}")]),
        ('<tool_call>{"arguments":{"a":1}, "x": [2], "name":"now"}</tool_call>', "", [("now", '{"a":1}')]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (
            f'<tool_call>\n{{"name": "now", "arguments": {{}}}}\n{{"name": "weather", "arguments": {OSLO}}}',
            "",
            [("now", "{}"), ("weather", OSLO)],
        ),
        (hermes("now", "{}") + "\n \n", "", [("now", "{}")]),
        ("Sunny.\n\n", "Sunny.\n\n", []),
        ("Write <tool_call> to call.", "Write <tool_call> to call.", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>{"name": "now", ', '<tool_call>{"name": "now", ', []),
        ("<tool_call>" + hermes("now", "{}"), "<tool_call>", [("now", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": ]} x</tool_call> y', " y", [("f", '{"a": ]} x')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')]),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}', '<tool_call>{"name": "\\ud800", "arguments": {}}', []),
    ],
    "llama3": [
        ("It is sunny.", "It is sunny.", []),
        ('{"name": "weather", "parameters": ' + OSLO + "}", "", [("weather", OSLO)]),
        ('<|python_tag|>{"name": "now", "arguments": {}}', "", [("now", "{}")]),
        (
            '{"name": "weather", "parameters": ' + FAKE + '}; {"name": "now", "parameters": {}}',
            "",
            [("weather", FAKE), ("now", "{}")],
        ),
        ('Well. <|python_tag|>{"name": "now", "parameters": {}}', "Well.", [("now", "{}")]),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"name": "now", "age": 5}', '{"name": "now", "age": 5}', []),
        ('{"name": "now", "parameters": {}}; done', "; done", [("now", "{}")]),
        ('<|python_tag|>print("hi")', '<|python_tag|>print("hi")', []),
    ],
    "mistral": [
        ("It is sunny.", "It is sunny.", []),
        (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {FAKE}}}]', "", [("weather", FAKE)]),
        (
            f'Hm.[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}}}] So.',
            "Hm. So.",
            [("weather", OSLO), ("now", "{}")],
        ),
        (f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]now{{}}", "", [("weather", OSLO), ("now", "{}")]),
        (f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{OSLO}", "", [("weather", OSLO)]),
        ("[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        ("[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]", []),
    ],
    "pythonic": [
        ("It is sunny.", "It is sunny.", []),
        ('[weather(city="Oslo", days=3)]', "", [("weather", OSLO)]),
        (
            "[now(), weather(city='a)]\\'\"', place={'a': (1, -2.5, None)}, hourly=True)]",
            "",
            [("now", "{}"), ("weather", '{"city": "a)]\'\\"", "place": {"a": [1, -2.5, null]}, "hourly": true}')],
        ),
        ('[weather("Oslo", 3)]', "", [("weather", OSLO)]),
        ('<|python_start|>[weather(city="a\nb\\d")]<|python_end|>', "", [("weather", '{"city": "a\\nb\\\\d"}')]),
        (
            '[weather(city="""say "hi"\n""", place={"a": [true, null]})]',
            "",
            [("weather", '{"city": "say \\"hi\\"\\n", "place": {"a": [true, null]}}')],
        ),
        ("[weather(city=open('x'))]", "[weather(city=open('x'))]", []),
        ("[weather(city=1-1)]", "[weather(city=1-1)]", []),
        ("[weather(city={1, 2})]", "[weather(city={1, 2})]", []),
        ("[1, 2]", "[1, 2]", []),
        ("[other(a=1)]", "[other(a=1)]", []),
        ("[now(), other(a=1)]", ", other(a=1)]", [("now", "{}")]),
        ("[weather(days=1, city=f(2))] x", " x", [("weather", '{"days": 1, city=f(2)}')]),
        ("[weather(days=1, city=2] x", "", [("weather", '{"days": 1, city=2] x')]),
        ("[weather(days=1", "[weather(days=1", []),
    ],
    "qwen3_coder": [
        ("It is sunny.", "It is sunny.", []),
        ("Sure.\n" + coder("weather", city="Oslo", days="3"), "Sure.", [("weather", OSLO)]),
        (coder("now") + "\n" + coder("now"), "", [("now", "{}"), ("now", "{}")]),
        (
            coder("weather", hourly="True", place='{"a": [1]}', note="null", kind="1"),
            "",
            [("weather", '{"hourly": true, "place": {"a": [1]}, "note": null, "kind": 1}')],
        ),
        (
            coder("weather", city=' "a"\n\n', days="three", note="5", unknown="7", kind="b"),
            "",
            [("weather", '{"city": " \\"a\\"\\n\\n", "days": "three", "note": "5", "unknown": "7", "kind": "b"}')],
        ),
        ("<function=now>\n</function> ok", " ok", [("now", "{}")]),
        (
            "<function=weather><parameter=city>a\n<parameter=days>2\n</function>",
            "",
            [("weather", '{"city": "a", "days": 2}')],
        ),
        ("<tool_call>\nno", "<tool_call>\nno", []),
        ("<function=weather>\n<parameter=city>\nOs", "", [("weather", '{"city": "Os')]),
    ],
}
CASES["mistral_args"] = CASES["mistral"]


@pytest.mark.parametrize("format", CASES)
def test_what_is_found(format: str) -> None:
    for text, content, calls in CASES[format]:
        assert parsed(format, [text]) == (content, calls)
        assert parsed(format, text) == (content, calls), "one character at a time"


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "; ", "x", "\\"),
    *('{"name": "weather", "arguments": ', '{"name": "now", "parameters": ', '"arguments": {"a": 1}', '"name": "now"'),
    *("<function=weather>", "</function>", "<parameter=city>", "<parameter=days>", "\n</parameter>", "\n", " ", "now"),
    *("[weather(city=", "now(", "days=", "'", '"', "(", ")", "[", "]", "{", "}", ",", ":", "=", "1", "-", "true", "é"),
    *(hermes("weather", FAKE), coder("weather", city="a", days="2"), "[now(), weather(city='x', days=3)]"),
    *(
        f"[TOOL_CALLS] [{hermes('now', '{}')[12:-13]}]",
        f"[TOOL_CALLS]now[ARGS]{OSLO}",
        '{"name": "now", "parameters": {}}',
    ),
]
texts = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=12).map("".join)


@given(st.sampled_from(sorted(FORMATS)), texts, st.lists(st.integers(0, 20), max_size=40))
@example("hermes", '<tool_call>{"name": "' + "a" * 300 + '<tool_call>{"name": "now"}', [1] * 400)
@example("mistral", "[TOOL_CALLS]" + "a" * 300 + "[TOOL_CALLS]now{}", [1] * 400)
def test_cuts_change_nothing_and_nothing_is_lost(format: str, text: str, sizes: list[int]) -> None:
    text = "".join(char for char in text if not 0xD800 <= ord(char) < 0xE000)  # text is decoded UTF-8
    whole = parsed(format, [text])
    assert parsed(format, pieces_of(text, sizes)) == whole
    assert parsed(format, text) == whole
    content, calls = whole
    if not calls:
        assert content == text
    "".join([content, *(name + arguments for name, arguments in calls)]).encode()


def pieces_of(text: str, sizes: list[int]) -> Iterator[str]:
    at = 0
    for size in sizes:
        yield text[at : at + size]
        at += size
    yield text[at:]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.text("abcdefg_", min_size=1, max_size=5)


@given(st.dictionaries(names, values, max_size=4), st.booleans(), st.lists(st.integers(1, 9), max_size=30))
def test_valid_arguments_come_through(arguments: dict[str, Any], plain: bool, sizes: list[int]) -> None:
    text = json.dumps(arguments, ensure_ascii=plain)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(arguments)
    for format, answer in {
        "hermes": hermes("weather", text) + hermes("now", "{}"),
        "llama3": f'{{"name": "weather", "parameters": {text}}}; {{"name": "now", "parameters": {{}}}}',
        "mistral": f"[TOOL_CALLS]weather[ARGS]{text}[TOOL_CALLS]now[ARGS]{{}}",
    }.items():
        assert parsed(format, pieces_of(answer, sizes)) == ("", [("weather", text), ("now", "{}")])
    for spell in (repr, json.dumps):
        calls = f"[weather({', '.join(f'{key}={spell(value)}' for key, value in arguments.items())}), now()]"
        if any(0xD800 <= ord(char) < 0xE000 for char in calls):
            continue
        content, found = parsed("pythonic", pieces_of(calls, sizes))
        assert (content, found[1:]) == ("", [("now", "{}")])
        assert json.loads(found[0][1]) == arguments


@given(st.dictionaries(names, values, max_size=4), st.lists(st.integers(1, 9), max_size=30))
def test_bare_values_get_the_types_of_the_schema(arguments: dict[str, Any], sizes: list[int]) -> None:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    properties = {key: {"type": kinds.get(type(value), "null")} for key, value in arguments.items()}
    spelt = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    if any(re.search("[\ud800-\udfff]|</parameter>|\n<(parameter=|/function>)", text) for text in spelt.values()):
        return
    parser = new_parser("qwen3_coder", {"f": {"properties": properties}})
    events = [event for piece in pieces_of(coder("f", **spelt), sizes) for event in parser.feed(piece)]
    text = "".join(event.text for event in [*events, *parser.finish()] if isinstance(event, CallArguments))
    assert json.loads(text) == arguments


@pytest.mark.parametrize("format", FORMATS)
def test_arguments_come_before_the_call_ends(format: str) -> None:
    text = next(text for text, _, calls in CASES[format] if calls == [("weather", OSLO)])
    parser = new_parser(format, TOOLS)
    events = [event for char in text[: text.rindex("3")] for event in parser.feed(char)]
    assert sum(isinstance(event, CallStart) for event in events) == 1
    early = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert early.startswith('{"city": "Oslo"')


HOSTILE = {
    "nested arguments": hermes("weather", '{"a": ' + "[" * 2500),
    "nested values": f"{hermes('weather', '{' * 3000)}[TOOL_CALLS]now{{{'[' * 3000}",
    "marks": "<tool_call>" * 500 + "[TOOL_CALLS]" * 500 + "<|python_tag|>" * 500,
    "half marks": "<tool_call" * 500 + "[TOOL_CALLS" * 500,
    "unclosed": '<tool_call>{"name": "' + "a" * 3000,
    "late name": '<tool_call>{"arguments": {"a": "' + "x" * 3000 + '"}, "name": "f"}',
    "escapes": '<tool_call>{"name": "f", "arguments": "' + "\\" * 3000,
    "python depth": "[weather(city=" + "[" * 3000,
    "python operators": "[weather(city=" + "-" * 2500 + "1)]",
    "python sums": "[weather(city=" + "1" + "-1" * 3000 + ")]",
    "python words": "[weather(city=" + "not " * 3000 + "1)]",
    "python strings": "[weather(city=" + "'a" * 2501 + ")]",
    "python digits": "[weather(city=" + "1" * 3000 + "x)]",
    "parameters": "<function=weather>" + "<parameter=days>" * 500 + "[" * 3000 + "\n</parameter>\n</function>",
    "spaces": "<tool_call>" + " \n" * 2500,
}


@pytest.mark.parametrize("format", FORMATS)
def test_hostile_text_is_read_once(format: str) -> None:
    """Linear time: the text that waits to be read again stays short."""
    for name in HOSTILE:
        for text in (
            HOSTILE[name],
            "[weather(" + HOSTILE[name],
            '{"name": "now", "parameters": {"a": ' + HOSTILE[name],
        ):
            parser: Any = new_parser(format, TOOLS)
            longest = 0
            for piece in pieces_of(text, [7] * (len(text) // 7)):
                parser.feed(piece)
                longest = max(longest, len(parser._scan.text) - parser._scan.at)
            parser.finish()
            assert longest <= 32
            assert parsed(format, [text * 5]) == parsed(format, pieces_of(text * 5, [9000] * 50))


def test_names_of_parsers() -> None:
    assert format_named("hermes") == "hermes" and format_named("llama3_json") == "llama3"
    with pytest.raises(ValueError, match="'xml': must be one of hermes, llama3"):
        format_named("xml")


def test_ids() -> None:
    def id_of(format: str, text: str) -> str:
        return next(event.id for event in new_parser(format, TOOLS).feed(text) if isinstance(event, CallStart))

    assert re.fullmatch("call_[0-9a-f]{24}", id_of("hermes", hermes("now", "{}")))
    assert re.fullmatch("[0-9a-zA-Z]{9}", id_of("mistral", "[TOOL_CALLS]now{}")), "what Mistral's templates accept"


_ARGUMENTS = '{"city": "Oslo"}'
_CALLS = {
    "hermes": hermes("weather", _ARGUMENTS) + "\n" + hermes("now", "{}"),
    "llama3": f'<|python_tag|>{{"name": "weather", "parameters": {_ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]',
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
    "pythonic": '<|python_start|>[weather(city="Oslo"), now()]<|python_end|>',
    "qwen3_coder": coder("weather", city="Oslo") + "\n" + coder("now"),
}


@pytest.mark.parametrize("format", sorted(_CALLS))
def test_calls_that_are_cut_anywhere_leave_no_content(format: str) -> None:
    whole = _CALLS[format]
    assert parsed(format, [whole])[0] == "" and len(parsed(format, [whole])[1]) == 2
    before = "" if format == "pythonic" else "Let me look."  # its calls are whole answers
    for end in range(1, len(whole)):
        for pieces in ([before + whole[:end]], [before, *whole[:end]]):
            content, calls = parsed(format, pieces, cut=True)
            assert content == before, (whole[:end], content)
            assert [name for name, _ in calls] == ["weather", "now"][: len(calls)]


def test_text_that_is_cut_stays_content() -> None:
    for format in sorted(FORMATS):
        for whole in ("It is sunny.\n", '{"answer": "a long one', "[1, 2", "(a] b; c, ", "  "):
            assert parsed(format, list(whole), cut=True) == (whole, []), format
    assert parsed("hermes", ["a <"]) == ("a <", []), "the answer has ended by itself"
