"""Properties of a model that its chat template reveals: the format of tool calls, and the tags around reasoning."""

from __future__ import annotations

__all__ = ["reasoning_tags", "tool_format"]

_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def tool_format(template: str) -> str | None:
    """The format of its tool calls; None if it is none of these:

    hermes        <tool_call> {"name": ..., "arguments": {...}} </tool_call>
    qwen3_coder   <tool_call> <function=name> <parameter=key> value </parameter> </function> </tool_call>
    llama3        {"name": ..., "parameters": {...}}, optionally after <|python_tag|>
    mistral       [TOOL_CALLS] [{"name": ..., "arguments": {...}}]
    mistral_args  [TOOL_CALLS]name[ARGS]{...}
    pythonic      [name(key=value), ...]
    """
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template and not any(other in template for other in ("<arg_key>", "<tool_calls>")):
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if "[func_name1(" in template:
        return "pythonic"
    has_parameters = '"parameters":' in template or '\\"parameters\\":' in template
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and has_parameters):
        return "llama3"
    return None


def reasoning_tags(template: str) -> tuple[str, str] | None:
    """The tags that open and close the model's reasoning; None if the template has none."""
    return next((pair for pair in _TAGS if pair[1] in template), None)
