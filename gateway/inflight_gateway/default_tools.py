"""Tools for models whose chat template has none, or calls them in an unknown form.

Tools, calls and results become text of messages, in the form in which Hermes and Qwen write them.  The parser `hermes`
reads the model's calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from inflight_gateway.errors import APIError
from inflight_gateway.upstream import AnyUpstream, ServedModel

__all__ = ["DEFAULT_FORMAT", "takes_system_messages", "with_tools"]

DEFAULT_FORMAT = "hermes"

_INSTRUCTIONS = """\
You can call functions. Each line between the tags describes one, with a JSON Schema of its parameters:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments:
<tool_call>
{{"name": "the function's name", "arguments": {{"parameter": "value"}}}}
</tool_call>

The result comes in the next message, between <tool_response> and </tool_response>.
If no function helps, answer in text."""

_PROBE = "This is a system message."
# By upstream and model: whether its template renders system messages.
_known: WeakKeyDictionary[AnyUpstream, dict[str, bool]] = WeakKeyDictionary()

Message = dict[str, Any]
_Turn = tuple[Message, list[str]]  # a message and its texts, joined at the end: there can be very many


def with_tools(messages: Sequence[Message], tools: Sequence[Any], in_system: bool) -> list[Message]:
    """Messages of `template_messages`, with tools, calls and results as text.

    Args:
        tools: that can be called; none: only the calls and results of the conversation are converted.
        in_system: describe the tools in a system message; else in the first message of the user.
    """
    turns: list[_Turn] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            _append(turns, {"role": "user", "content": result})
        elif "tool_calls" in message:
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            calls = "\n".join(map(_call, message["tool_calls"]))
            _append(turns, {**rest, "content": "\n".join(filter(None, [message["content"], calls]))})
        else:
            _append(turns, dict(message))
    found = [{**message, "content": "\n".join(texts)} for message, texts in turns]
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        _describe(found, _INSTRUCTIONS.format(tools=lines), "system" if in_system else "user")
    return found


def _append(turns: list[_Turn], message: Message) -> None:
    """Add a message.  Several results, or a result and a question, are one message: many templates ask for turns."""
    last, texts = turns[-1] if turns else ({}, [])
    if message["role"] == last.get("role") == "user" and texts[-1].endswith("</tool_response>"):
        texts.append(message["content"])
        turns[-1] = message, texts
    else:
        turns.append((message, [message["content"]]))


def _call(call: Any) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {text}}}\n</tool_call>'


def _describe(messages: list[Message], text: str, role: str) -> None:
    """Put the text behind what a first system message says, or before what a user asks first."""
    if role == "system" and messages[0]["role"] == "system":
        messages[0]["content"] = "\n\n".join(filter(None, [messages[0]["content"], text]))
        return
    asked = next((message for message in messages if message["role"] == role == "user"), None)
    if asked is None:
        messages.insert(0, {"role": role, "content": text})
    else:
        asked["content"] = f"{text}\n\n{asked['content']}"


async def takes_system_messages(upstream: AnyUpstream, model: ServedModel) -> bool:
    """Whether the model's template renders system messages: some refuse them, and some leave them out.

    The model is asked once.
    """
    if not model.is_inflight:
        return True  # it cannot be asked
    known = _known.setdefault(upstream, {})
    if model.name not in known:
        chat = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hi"}]
        try:
            tokens = (await upstream.tokenize(model, messages=chat))["tokens"]
            known[model.name] = _PROBE in await upstream.detokenize(model, tokens)
        except APIError as error:
            if error.status != 400:
                raise  # no server answers, for example
            known[model.name] = False
    return known[model.name]
