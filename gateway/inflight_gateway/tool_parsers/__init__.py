"""Parsers of tool calls, one file for each format, all behind the Protocol `ToolParser`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight_gateway.tool_parsers.base import TextParser, ToolParser
from inflight_gateway.tool_parsers.events import CallArguments, CallEnd, CallStart, Content, Event
from inflight_gateway.tool_parsers.hermes import HermesParser
from inflight_gateway.tool_parsers.llama3 import Llama3Parser
from inflight_gateway.tool_parsers.mistral import MistralParser
from inflight_gateway.tool_parsers.pythonic import PythonicParser
from inflight_gateway.tool_parsers.qwen3_coder import Qwen3CoderParser

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Event",
    "TextParser",
    "ToolParser",
    "format_named",
    "new_parser",
]

FORMATS: dict[str, type[TextParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "mistral_args": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}
# The names of vLLM's `--tool-call-parser` for the same formats.
_VLLM = {
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}


def format_named(name: str) -> str:
    """The format of a parser with this name, ours or vLLM's.

    Raises:
        ValueError: there is none.
    """
    found = _VLLM.get(name, name)
    if found not in FORMATS:
        raise ValueError(f"tool_call_parser {name!r}: must be one of {', '.join([*FORMATS, *_VLLM])}")
    return found


def new_parser(format: str, tools: Mapping[str, Any]) -> ToolParser:
    """A parser for one answer; `tools` are JSON Schemas of the arguments, by name."""
    return FORMATS[format](tools)
