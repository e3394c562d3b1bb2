from __future__ import annotations

from typing import Any

import pytest
from chat_templates import TEMPLATES

from inflight.frontend.chat.tool_format import reasoning_tags, tool_format


def test_the_format_of_tool_calls_shows_in_the_template() -> None:
    assert {name: tool_format(text) for name, text in TEMPLATES.items()} == {name: name for name in TEMPLATES}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", None),
        ("<|start_header_id|>{{ tool }}", None),
        ("'<|python_tag|>' + tool_call.name", "llama3"),
        ('<|start_header_id|>system [func_name1(params_name1=params_value1)] "parameters":', "pythonic"),
        ("<tool_call>{{ name }}\n<arg_key>", None),
        ("<tool_calls><tool_call>", None),
        ("<|tool_calls_section_begin|>", None),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral_args"),
    ],
)
def test_formats_of_other_templates(template: str, expected: str | None) -> None:
    assert tool_format(template) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% set content = content.split('</think>')[-1] %}", ("<think>", "</think>")),
        ("[THINK]{{ x }}[/THINK]", ("[THINK]", "[/THINK]")),
        ("I think", None),
    ],
)
def test_tags_of_reasoning(template: str, expected: Any) -> None:
    assert reasoning_tags(template) == expected
