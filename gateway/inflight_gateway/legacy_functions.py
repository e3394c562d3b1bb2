"""`functions` and `function_call`, which OpenAI's chats had before `tools`: an answer calls one function at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight_gateway.errors import invalid

__all__ = ["messages_with_tools", "tool_choice_of", "tools_of"]


def tools_of(functions: Any) -> list[Any]:
    """The same functions as tools.

    Raises:
        APIError: not a list of objects.
    """
    if not isinstance(functions, list) or not all(isinstance(one, Mapping) for one in functions):
        raise invalid('functions: a list of objects such as {"name": "f", "parameters": {}} is expected', "functions")
    return [{"type": "function", "function": function} for function in functions]


def tool_choice_of(function_call: Any) -> Any:
    """`function_call` as a `tool_choice`: auto, none, or the name of a function.

    Raises:
        APIError: anything else.
    """
    if isinstance(function_call, Mapping) and isinstance(function_call.get("name"), str):
        return {"type": "function", "function": {"name": function_call["name"]}}
    if function_call not in (None, "auto", "none"):
        raise invalid('function_call: auto, none or {"name": "f"} is expected', "function_call")
    return function_call


def messages_with_tools(messages: Any) -> Any:
    """The messages with calls and results in the form of tools; other messages unchanged.

    A message of the role `function` answers the `function_call` of the message before it.
    """
    if not isinstance(messages, list):
        return messages
    found, call_id = [], ""
    for number, message in enumerate(messages):
        if isinstance(message, Mapping):
            call = message.get("function_call")
            if message.get("role") == "assistant" and call is not None and not message.get("tool_calls"):
                call_id = f"{number:09}"  # in the only form that Mistral's templates accept
                message = {**message, "tool_calls": [{"id": call_id, "type": "function", "function": call}]}
            elif message.get("role") == "function":
                message = {**message, "role": "tool", "tool_call_id": call_id or f"{number:09}"}
        found.append(message)
    return found
