"""Reasoning and constraints: what is split off an answer, and what an answer after reasoning must look like."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_client import ScriptedClient
from tokenizers import AddedToken, Tokenizer

from inflight.frontend.request.structured_outputs import structured_outputs
from inflight.grammars.base import MaskJob, mask_words
from inflight.grammars.guidance import GuidanceGrammars
from inflight_client import ChoiceDelta, StreamChunk, tool_calls
from inflight_gateway.errors import APIError
from inflight_gateway.options import GatewayOptions
from inflight_gateway.reasoning import ReasoningParser
from inflight_gateway.reasoning_formats import reasoning_tags
from inflight_gateway.reasoning_tokens import ReasoningTokens
from inflight_gateway.response_format import behind_reasoning, calls_or, response_constraint

TAGS = ("<think>", "</think>")
DEMO = Path(__file__).parents[2] / "model_repository" / "demo" / "1" / "checkpoint" / "tokenizer.json"
EOS = 0


def split(pieces: Any, opened: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(TAGS, opened)
    parts = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def test_reasoning_is_split_off() -> None:
    for text, opened, expected in [
        ("5", False, ("", "5")),
        (" \n5 ", False, ("", " \n5 ")),
        ("<think>\na\n\nb\n</think>\n\n5 ", False, ("a\n\nb", "5 ")),
        ("\n<think></think>5", False, ("", "5")),
        ("a</think>5", True, ("a", "5")),
        ("<think>a</think>5</think>", True, ("a", "5</think>")),
        ("a", True, ("a", "")),
        ("<thin", False, ("", "<thin")),
        ("", True, ("", "")),
        ("a <think>b</think>", False, ("", "a <think>b</think>")),
    ]:
        assert split([text], opened) == expected
        assert split(text, opened) == expected, "one character at a time"


parts = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", " ", "\n", "a", "think>"]), max_size=12)


@given(parts, st.booleans())
def test_cuts_change_nothing(pieces: list[str], opened: bool) -> None:
    whole = split(["".join(pieces)], opened)
    assert split(pieces, opened) == whole == split("".join(pieces), opened)
    if not opened and not "".join(pieces).lstrip().startswith("<think>"):
        assert whole == ("", "".join(pieces))


def test_long_reasoning_is_read_once() -> None:
    parser = ReasoningParser(TAGS, True)
    for _ in range(20_000):
        parser.feed(" \n</think")
        assert len(parser._scan.text) - parser._scan.at < 10


def test_tokens_of_reasoning_are_counted() -> None:
    for token_ids, opened, expected in [
        ([1, 5, 5, 2, 6], False, 2),
        ([4, 1, 5, 2, 6, 1, 6], False, 1),  # whitespace before the tag, and another tag further on
        ([6, 6, 1, 5, 2], False, 0),
        ([5, 5, 5, 2, 6], True, 3),
        ([1, 5, 2, 6], True, 1),
        ([5, 5], True, 2),
        ([1, 5, 5], False, 2),
        ([1, 2, 6], False, 0),
        ([], True, 0),
    ]:
        whole, cut = ReasoningTokens((1, 2), opened), ReasoningTokens((1, 2), opened)
        whole.add(0, token_ids)
        for token in token_ids:
            for index in range(3):
                cut.add(index, [token])
        assert (whole.count, cut.count) == (expected, 3 * expected)


async def test_usage_tells_the_tokens_of_reasoning(start: Any) -> None:
    parts = [("<think>", 1), ("h", 5), ("m", 5), ("</think>", 2), ("5", 6)]
    chunks = [
        StreamChunk(choices=[ChoiceDelta(index=0, text=text, token_ids=[token], num_tokens=1)], num_input_tokens=3)
        for text, token in parts
    ]
    chunks[-1].choices[0].finish_reason = "stop"
    client = ScriptedClient(lambda request: chunks)
    client.info.update({"reasoning_tags": list(TAGS), "reasoning_token_ids": [1, 2]})
    front = await start(client)
    chat: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    whole = await front.openai.chat.completions.create(**chat)
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2
    stream = await front.openai.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
    usage = [chunk async for chunk in stream][-1].usage
    assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (5, 2)
    response = await front.openai.responses.create(model="demo", input="Hi")
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    events = await front.openai.responses.create(model="demo", input="Hi", stream=True)
    assert [event async for event in events][-1].response.usage.output_tokens_details.reasoning_tokens == 2
    client.info["reasoning_token_ids"] = None
    front = await start(client)
    assert (await front.openai.chat.completions.create(**chat)).usage.completion_tokens_details is None


def test_which_tags() -> None:
    assert reasoning_tags("", {"reasoning_tags": ["[T]", "[/T]"]}) == ("[T]", "[/T]")
    assert reasoning_tags("", {}) is None and reasoning_tags("none", {"reasoning_tags": TAGS}) is None
    assert reasoning_tags("qwen3", {}) == TAGS
    with pytest.raises(ValueError, match="'x': must be none, or one of deepseek_r1"):
        GatewayOptions(reasoning_parser="x")
    with pytest.raises(ValueError, match="tool_call_parser 'x': must be one of hermes"):
        GatewayOptions(tool_call_parser="x")
    assert GatewayOptions(reasoning_parser="none", tool_call_parser="llama3_json")


@pytest.fixture(scope="module", params=["text", "ordinary token", "special token"])
def accepts(request: pytest.FixtureRequest) -> Any:
    """Tells whether a text is a complete answer under a constraint; tags are spelled out, or special tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO))
    if request.param != "text":
        special = request.param == "special token"
        marks = [AddedToken(mark, special=special, normalized=False) for mark in (*TAGS, "<tool_call>")]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(marks)
    grammars = GuidanceGrammars(tokenizer.to_str, tokenizer.get_vocab_size(), [EOS])

    def check(constraint: dict[str, Any], text: str) -> bool:
        spec = structured_outputs("test", constraint)
        assert spec is not None
        deadline = time.monotonic() + 60
        while (found := grammars.outcome(spec)) is None:
            assert time.monotonic() < deadline
        assert found == "", found
        sequence = grammars.new(spec)
        sequence.advance(tokenizer.encode(text, add_special_tokens=False).ids)
        bitmask = np.empty((1, mask_words(tokenizer.get_vocab_size())), dtype=np.int32)
        grammars.fill([MaskJob(sequence, 0, [])], bitmask)
        return not sequence.error and bool(bitmask[0, EOS // 32] >> EOS % 32 & 1)

    return check


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
CONSTRAINTS: list[tuple[dict[str, Any], str, str]] = [
    ({"json": SCHEMA}, '{"a": 5}', '{"b": 5}'),
    ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, '{"a":5}', '{"a": 5}'),
    ({"json_object": True}, "{}", "[]"),
    ({"regex": "[0-9]+"}, "17", "x"),
    ({"choice": ["yes", "no"]}, "no", "maybe"),
    (tool_calls([{"name": "f"}], "hermes", "required"), CALL, "x"),
]


@pytest.mark.parametrize(("constraint", "good", "bad"), CONSTRAINTS)
def test_constraints_apply_after_the_reasoning(accepts: Any, constraint: dict[str, Any], good: str, bad: str) -> None:
    free, opened = behind_reasoning(constraint, TAGS, False), behind_reasoning(constraint, TAGS, True)
    for text, valid in ((good, True), (bad, False)):
        assert accepts(free, f"<think>\nhm {{ </think>\n\n{text}") == valid
        assert accepts(opened, f"hm {{ </think>\n\n{text}") == valid
        assert accepts(free, text) == valid
        assert not accepts(opened, text)


def test_a_grammar_constrains_the_whole_answer(accepts: Any) -> None:
    constraint = {"grammar": 'root ::= "a"'}
    assert behind_reasoning(constraint, TAGS, True) == constraint and accepts(constraint, "a")


def test_calls_or_a_response(accepts: Any) -> None:
    response = response_constraint({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    assert response is not None
    both = calls_or(tool_calls([{"name": "f"}], "hermes", "required"), response)
    assert accepts(both, CALL) and accepts(both, '{"a": 5}')
    assert not accepts(both, "x") and not accepts(both, '{"b": 5}')
    with pytest.raises(APIError, match="a grammar beside tools is not supported"):
        calls_or(both, {"grammar": 'root ::= "a"'})


def test_formats() -> None:
    assert response_constraint(None) is response_constraint({"type": "text"}) is None
    assert response_constraint({"type": "json_object"}) == {"json_object": True}
    flat = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    assert response_constraint(flat) == {"json": SCHEMA}
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    assert json.loads((response_constraint(tag) or {})["structural_tag"]) == tag
