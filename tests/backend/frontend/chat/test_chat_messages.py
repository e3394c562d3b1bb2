"""Chats with tools and options: prompts equal those of transformers' `apply_chat_template`."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from chat_templates import HERMES, LLAMA3, MISTRAL, PYTHONIC, TEMPLATES
from frontend_rig import CHECKPOINT
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.frontend.chat.chat_messages import ChatTemplateError, has_template, read_chat
from inflight.frontend.chat.chat_template import ChatTemplate
from inflight.frontend.chat.renderer import TemplateRenderer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Wetter in 'Köln'", "parameters": PARAMETERS}},
    {
        "type": "function",
        "function": {"name": "clock", "description": "", "parameters": {**PARAMETERS, "required": []}},
    },
]
ASK = {"role": "user", "content": '  how is <Köln> & "Aachen"? \n'}
SYSTEM = {"role": "system", "content": "be brief"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "content": '{"rain": true}', "tool_call_id": "a", "name": None}
SAID = {"role": "assistant", "content": "It rains  "}
THOUGHT = {"role": "assistant", "reasoning_content": "hm\n", "content": "It rains"}
INLINE = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt rains"}

CHATS = {
    "one": [ASK],
    "system": [SYSTEM, ASK],
    "long": [SYSTEM, ASK, SAID, ASK],
    "called": [ASK, CALLED, ANSWERED],
    "said": [SYSTEM, ASK, SAID],
    "thought": [ASK, THOUGHT],
    "inline": [ASK, INLINE],
}


@cache
def tokenizer(template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_file=str(CHECKPOINT / "tokenizer.json"), **SPECIAL)
    made.chat_template = template
    return made


@cache
def ours(template: str) -> TemplateRenderer:
    return TemplateRenderer(template, SPECIAL)


def transformers_say(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    variables = options.pop("chat_template_kwargs", {})
    said: str = tokenizer(template).apply_chat_template(messages, tokenize=False, **options, **variables)
    return said


def we_say(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ours(template).render(json.dumps({"messages": messages, **options}).encode()).decode()


def same(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """The prompt of both renderers; asserts that they agree.  An error in both counts as agreement."""
    options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
    try:
        expected = transformers_say(template, messages, **options)
    except Exception:
        with pytest.raises(ChatTemplateError):
            we_say(template, messages, **options)
        return ""
    assert we_say(template, messages, **options) == expected
    return expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_and_the_generation_prompt(name: str) -> None:
    for chat, tools, prompts in product(CHATS.values(), (None, [], TOOLS), (True, False)):
        same(TEMPLATES[name], chat, tools=tools, add_generation_prompt=prompts)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_last_message_is_continued(name: str) -> None:
    for chat, tools, field in product(CHATS, (None, TOOLS), (True, "reasoning_content")):
        options = {"tools": tools, "add_generation_prompt": False, "continue_final_message": field}
        prompt = same(TEMPLATES[name], CHATS[chat], **options)
        if chat == "said" and field is True:
            keeps_spaces = name in ("hermes", "qwen3_coder", "pythonic")
            assert prompt.endswith("It rains  " if keeps_spaces else "It rains"), prompt


def test_the_cases_are_no_errors_throughout() -> None:
    """`same` takes two errors for agreement: these must render."""
    assert "# Tools" in same(HERMES, CHATS["called"], tools=TOOLS, add_generation_prompt=True)
    assert '"parameters": {"city": "Köln"' in same(LLAMA3, CHATS["called"], tools=None, add_generation_prompt=True)
    assert "[AVAILABLE_TOOLS] [{" in same(MISTRAL, CHATS["system"], tools=TOOLS, add_generation_prompt=True)
    assert same(HERMES, CHATS["thought"], continue_final_message="reasoning_content").endswith("<think>\nhm\n")


@pytest.mark.parametrize(
    "variables",
    [
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"bos_token": "[B]"},
        {"date_string": "1 May 2026"},
        {"self": 1},
    ],
)
def test_variables_of_the_template(variables: dict[str, Any]) -> None:
    for template in (HERMES, LLAMA3):
        if "self" in variables:
            we_say(template, [ASK], chat_template_kwargs=variables)  # transformers cannot take this name
        else:
            same(template, [ASK], add_generation_prompt=True, chat_template_kwargs=variables)


def test_parts_of_content_are_the_templates_affair() -> None:
    parts = {"role": "assistant", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b "}, {"x": 1}]}
    assert same(PYTHONIC, [ASK, parts], continue_final_message=True).endswith("a b ")
    same(PYTHONIC, [ASK, parts], add_generation_prompt=True)
    same(PYTHONIC, [ASK, {"role": "assistant", "content": [{"x": 1}]}], continue_final_message=True)
    same(HERMES, [ASK, parts], continue_final_message=True)


def test_documents_are_none_unless_given() -> None:
    template = "{{ documents is none }}{% if documents %}{{ documents[0].text }}{% endif %}"
    same(template, [ASK])
    assert same(template, [ASK], chat_template_kwargs={"documents": [{"title": "t", "text": "d"}]}) == "Falsed"


def test_the_defaults() -> None:
    assert we_say(HERMES, [ASK]) == ours(HERMES).render(json.dumps([ASK]).encode()).decode()
    assert we_say(HERMES, [ASK]).endswith("<|im_start|>assistant\n")
    nulls = dict.fromkeys(("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"))
    assert we_say(HERMES, [ASK], **nulls) == we_say(HERMES, [ASK])
    assert we_say(HERMES, [ASK, SAID], continue_final_message=True).endswith("It rains  ")  # no generation prompt then


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ({}, 'the object has no "messages"'),
        ({"messages": []}, "got an empty list"),
        ({"messages": {"messages": [ASK]}}, "got a dict"),
        ({"messages": [ASK], "tool": []}, "the key 'tool': allowed are messages, tools, add_gen"),
        ({"messages": [ASK], "tools": TOOLS[0]}, "tools is not a list of objects"),
        ({"messages": [ASK], "add_generation_prompt": 1}, "add_generation_prompt is a int: must be true or false"),
        ({"messages": [ASK], "continue_final_message": 1}, "continue_final_message is a int"),
        ({"messages": [ASK], "continue_final_message": ""}, "continue_final_message is a str"),
        ({"messages": [ASK], "continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"messages": [ASK], "chat_template_kwargs": []}, "chat_template_kwargs is an empty list: must be an object"),
        ({"messages": [ASK], "chat_template_kwargs": {"messages": []}}, "may not set 'messages': send it beside"),
        (
            {"messages": [ASK], "chat_template_kwargs": {"chat_template": "x"}},
            "may not set 'chat_template': send it beside",
        ),
    ],
)
def test_an_invalid_request_is_named(chat: dict[str, Any], says: str) -> None:
    with pytest.raises(ChatTemplateError, match=says):
        read_chat(json.dumps(chat).encode())


def test_a_key_is_found_however_it_is_written() -> None:
    """Each of its letters can be escaped; what serializers escape for other reasons is none of them."""
    key = "chat_template"
    for place, letter in enumerate(key):
        for digits in {f"{ord(letter):04x}", f"{ord(letter):04X}"}:
            chat = f'{{"messages": [], "{key[:place]}\\u{digits}{key[place + 1 :]}": "x"}}'
            assert json.loads(chat)[key] == "x" and has_template(chat) and has_template(chat.encode()), chat
    assert has_template(r'["\\\u0061"]'), "two backslashes, and a letter"
    for text in ("`", "\x7f", "<>&'+", "\xe9\u6107", r"\u0061", r"\\u0074"):
        escaped = "".join(f"\\u{ord(one):04x}" if one in "`\x7f<>&'+" else json.dumps(one)[1:-1] for one in text)
        assert json.loads(f'"{escaped}"') == text
        assert not has_template(f'[{{"role": "user", "content": "{escaped}"}}]'), escaped


@pytest.mark.parametrize(
    ("template", "message", "says"),
    [
        (HERMES, {"role": "assistant", "tool_calls": [CALL]}, "no text in 'content' to go on with"),
        (HERMES, {"role": "assistant", "content": 5}, "no text in 'content' to go on with"),
        ("{{ messages[0].content }}", SAID, "leaves out the last message"),
        ("{{ messages[-1].content[:4] }}", SAID, "leaves out the last message"),
        ("{{ messages[-1].content | upper }}", SAID, "leaves out the last message"),
    ],
)
def test_a_message_that_cannot_be_continued(template: str, message: dict[str, Any], says: str) -> None:
    with pytest.raises(ChatTemplateError, match=says):
        we_say(template, [ASK, message], continue_final_message=True)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", " ", "a ", " \n", "</think>", "<think>\n", "CONTINUE_FINAL_MESSAGE_TAG ", "{{ 1 }}", "<|im_end|>"]
)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    texts=st.lists(TEXTS, min_size=1, max_size=4),
    fields=st.fixed_dictionaries({}, optional=dict.fromkeys(("reasoning_content", "reasoning", "thinking"), TEXTS)),
    tools=st.sampled_from([None, TOOLS]),
    continued=st.booleans(),
)
def test_any_texts(name: str, texts: list[str], fields: dict[str, str], tools: Any, continued: bool) -> None:
    roles = ["user", "assistant"]
    messages = [{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)]
    if len(messages) % 2 == 0:
        messages[-1] |= fields
    if continued and any("CONTINUE_FINAL_MESSAGE_TAG" in text for text in texts):
        return  # transformers cuts there: its mark can be sent, ours cannot
    same(TEMPLATES[name], messages, tools=tools, continue_final_message=continued)


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "with {{ tools | length }}"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chat = ChatTemplate.load(str(tmp_path))
    assert (chat.render(json.dumps([ASK])), chat.text) == ("plain", "with {{ tools | length }}")
    assert chat.render(json.dumps({"messages": [ASK], "tools": TOOLS})) == "with 2"
    chat.close()
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools' file")
    chat = ChatTemplate.load(str(tmp_path))
    assert chat.render(json.dumps([ASK])) == "file"
    assert chat.render(json.dumps({"messages": [ASK], "tools": TOOLS})) == "tools' file"
    chat.close()
    chat = ChatTemplate.load(str(tmp_path), override="mine")
    assert chat.render(json.dumps({"messages": [ASK], "tools": TOOLS})) == "mine"
    chat.close()
