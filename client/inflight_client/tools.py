"""Constrains answers with tool calls: free text, then calls with valid arguments.

The result is a value for `structured_outputs`.  Models were trained to write these formats:

    hermes (Qwen, too)   <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>
    llama3               {"name": "f", "parameters": {...}}
    mistral              [TOOL_CALLS] [{"name": "f", "arguments": {...}}]
    mistral_args         [TOOL_CALLS]f[ARGS]{...}   (Mistral's newer models)
    pythonic (Llama 4)   [f(a=1, b="x")]
    qwen3_coder          <tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from inflight_client.tool_formats import json_value, pythonic_calls, qwen3_coder_calls, some, tag

__all__ = ["ToolFormat", "tool_calls"]

ToolFormat = Literal["hermes", "llama3", "mistral", "mistral_args", "pythonic", "qwen3_coder"]


def tool_calls(
    tools: Sequence[Mapping[str, Any]],
    format: ToolFormat = "hermes",
    choice: str = "auto",
    parallel: bool = True,
) -> dict[str, Any]:
    """Keys of `structured_outputs` for an answer that can call some of `tools`.

    Args:
        tools: as in OpenAI's API: `{"type": "function", "function": {"name", "parameters"}}`, or the inner object
            alone.  No `parameters` means no arguments.
        format: the format of the model's calls.
        choice: "auto": text, calls, or both; "required": at least one call and no text; or the name of the tool that
            must be called.
        parallel: allow several calls.

    Raises:
        ValueError: no tools, a tool without a name, two tools with one name, an unknown choice or format, or a name
            that the format cannot express.
    """
    functions = _functions(tools)
    if choice not in ("auto", "required"):
        if choice not in functions:
            raise ValueError(f"choice={choice!r}: must be auto, required, or one of {', '.join(functions)}")
        functions = {choice: functions[choice]}
        parallel = False
    if format not in _WRITERS:
        raise ValueError(f"format={format!r}: must be one of {', '.join(_WRITERS)}")
    described = _WRITERS[format](functions, choice != "auto", parallel)
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": described})}


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Schema of the arguments by name."""
    found: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"tool {tool!r} has no name")
        if name in found:
            raise ValueError(f"two tools are named {name!r}")
        found[name] = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    if not found:
        raise ValueError("tools is empty: give at least one")
    return found


def _call(name: str, schema: Any, key: str, before: str = "", behind: str = "") -> dict[str, Any]:
    return tag(f'{before}{{"name": {json.dumps(name)}, "{key}": ', json_value(schema), "}" + behind)


def _hermes(functions: Mapping[str, Any], must: bool, parallel: bool) -> dict[str, Any]:
    mark = "<tool_call>"
    calls = [_call(n, s, "arguments", mark + "\n", "\n</tool_call>") for n, s in functions.items()]
    if must:
        return some(calls, "\n", parallel)
    return {"type": "triggered_tags", "triggers": [mark], "tags": calls, "stop_after_first": not parallel}


def _llama3(functions: Mapping[str, Any], must: bool, parallel: bool) -> dict[str, Any]:
    calls = some([_call(n, s, "parameters") for n, s in functions.items()], "; ", parallel)
    if must:
        return calls
    return {"type": "or", "elements": [{"type": "regex", "pattern": r"([^{](?s:.*))?"}, calls]}


def _mistral(functions: Mapping[str, Any], must: bool, parallel: bool) -> dict[str, Any]:
    mark, calls = "[TOOL_CALLS]", some([_call(n, s, "arguments") for n, s in functions.items()], ", ", parallel)
    opening, closing = ({"type": "const_string", "value": text} for text in (" [", "]"))
    listed = {"type": "sequence", "elements": [opening, calls, closing]}
    tag = {"type": "tag", "begin": mark, "content": listed, "end": ""}
    if must:
        return tag
    return {"type": "triggered_tags", "triggers": [mark], "tags": [tag], "stop_after_first": True}


def _mistral_args(functions: Mapping[str, Any], must: bool, parallel: bool) -> dict[str, Any]:
    mark = "[TOOL_CALLS]"
    calls = [tag(f"{mark}{name}[ARGS]", json_value(schema)) for name, schema in functions.items()]
    if must:
        return some(calls, "", parallel)
    return {"type": "triggered_tags", "triggers": [mark], "tags": calls, "stop_after_first": not parallel}


_WRITERS = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "mistral_args": _mistral_args,
    "pythonic": pythonic_calls,
    "qwen3_coder": qwen3_coder_calls,
}
