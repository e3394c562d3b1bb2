"""Converts a request of Anthropic's API to a chat: content blocks to messages, tools, output format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight_gateway.anthropic.messages_body import CountTokensBody, MessagesBody
from inflight_gateway.chat_messages import text_of
from inflight_gateway.chat_plan import ChatBody
from inflight_gateway.errors import APIError, invalid
from inflight_gateway.translations import THINKING_SWITCHES, Say

__all__ = ["chat_of_count", "chat_of_messages"]

# Claude Code describes itself in a system block that Anthropic's servers remove.  It differs from version to version
# and session to session, and as the first text of a prompt it would keep prefixes from being cached.
_BILLING = "x-anthropic-billing-header:"


def chat_of_messages(body: MessagesBody, say: Say) -> ChatBody:
    """The same request as a chat.

    Args:
        body: of the request.
        say: warns of tools that Anthropic's servers run, or that only Claude knows; these are left out.

    Raises:
        APIError: a message, a block, a tool or an option that is not supported; it says which.
    """
    if body.max_tokens < 1:
        raise invalid(f"max_tokens: {body.max_tokens} came; at least 1 is expected", "max_tokens")
    sampling = ("stream", "temperature", "top_p", "top_k", "cache_salt", "ignore_eos", "priority", "seed")
    return _chat(
        body,
        say,
        **{name: getattr(body, name) for name in sampling},
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
    )


def chat_of_count(body: CountTokensBody, say: Say) -> ChatBody:
    """As `chat_of_messages`, for a request whose prompt is only counted."""
    return _chat(body, say)


def _chat(body: CountTokensBody, say: Say, **options: Any) -> ChatBody:
    # Without `thinking`, Claude does not think.
    switches = dict.fromkeys(THINKING_SWITCHES, False) if body.include_reasoning is None else {}
    output = body.output_config
    # The effort only tells the template how much: `thinking` is the switch.
    effort = {} if output is None or output.effort is None else {"reasoning_effort": output.effort}
    template = {**effort, **switches, **(body.chat_template_kwargs or {})}
    shown = any(template.get(name) for name in switches) if body.include_reasoning is None else body.include_reasoning
    choice = {} if body.tool_choice is None else body.tool_choice
    messages = _messages(body)
    # Claude continues a last message of its own.
    continued = messages[-1]["role"] == "assistant"
    if continued and messages[-1].get("tool_calls"):
        raise _wrong(f"messages[{len(body.messages) - 1}]", "the results of its tool_use blocks are expected next")
    return ChatBody(
        model=body.model,
        messages=messages,
        tools=_tools(body.tools, say),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use") is True),
        response_format=None if output is None else output.format,
        include_reasoning=shown,
        chat_template_kwargs=template or None,
        continue_final_message=continued or None,
        add_generation_prompt=False if continued else None,
        user=None if body.metadata is None else body.metadata.user_id,
        **options,
    )


@dataclass
class _Turn:
    """A message of the chat; texts are joined at the end, because there can be very many."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None

    @property
    def is_empty(self) -> bool:
        return not (any(self.texts) or self.thoughts or self.calls)

    def message(self) -> dict[str, Any]:
        found: dict[str, Any] = {"role": self.role, "content": "\n".join(filter(None, self.texts))}
        if self.thoughts:
            found["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            found["tool_calls"] = self.calls
        if self.call_id is not None:
            found["tool_call_id"] = self.call_id
        return found


def _messages(body: CountTokensBody) -> list[dict[str, Any]]:
    """The messages of a chat; consecutive messages of a role become one, as at Anthropic."""
    if not isinstance(body.messages, list) or not body.messages:
        raise invalid('messages: a list of objects such as {"role": "user", "content": "Hi"} is expected', "messages")
    system = "" if body.system is None else _system(body.system)
    turns: list[_Turn] = []
    calls: set[str] = set()
    for number, message in enumerate(body.messages):
        where = f"messages[{number}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "user":
            _add_user(turns, _blocks(message, where), where, calls)
        elif role == "assistant":
            _add_assistant(_turn(turns, role), _blocks(message, where), where, calls)
        elif role == "system":
            # Many templates allow only one system message, in front.
            text = text_of(message.get("content"), f"{where}.content")
            _turn(turns, "user").texts.append(f"<system>\n{text}\n</system>")
        else:
            raise _wrong(where, "an object with content and the role user, assistant or system is expected")
    if turns[-1].role == "assistant" and turns[-1].is_empty:  # nothing to continue
        turns.pop()
    if not turns:
        raise _wrong("messages", "a message with text is expected")
    return [*([{"role": "system", "content": system}] if system else []), *(turn.message() for turn in turns)]


def _turn(turns: list[_Turn], role: str) -> _Turn:
    """The last turn if it has this role, else a new one."""
    if not turns or turns[-1].role != role:
        turns.append(_Turn(role))
    return turns[-1]


def _system(system: Any) -> str:
    """The text of the system prompt."""
    if isinstance(system, list):
        system = [block for block in system if not _is_billing(block)]
    return text_of(system, "system")


def _is_billing(block: Any) -> bool:
    text = block.get("text") if isinstance(block, Mapping) else None
    return isinstance(text, str) and text.startswith(_BILLING)


def _blocks(message: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The content blocks of a message, each an object with a type."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _wrong(f"{where}.content", "a string or a list of blocks is expected")
    for number, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            place = f"{where}.content[{number}]"
            raise _wrong(place, 'a block such as {"type": "text", "text": "Hi"} is expected')
    return content


def _add_user(turns: list[_Turn], blocks: list[Mapping[str, Any]], where: str, calls: set[str]) -> None:
    if not blocks:
        raise _wrong(f"{where}.content", "at least one block is expected")
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if block["type"] == "tool_result":
            turns.append(_result(block, place, calls))
        else:
            _turn(turns, "user").texts.append(_text(block, place, "text and tool_result"))


def _result(block: Mapping[str, Any], where: str, calls: set[str]) -> _Turn:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str) or call_id not in calls:
        raise _wrong(f"{where}.tool_use_id", f"{call_id!r:.100} is not the id of a tool_use block before it")
    content = block.get("content")
    text = "" if content is None else text_of(content, f"{where}.content")
    if block.get("is_error") is True:  # templates have no place for it
        text = f"Error: {text}"
    return _Turn("tool", [text], call_id=call_id)


def _add_assistant(turn: _Turn, blocks: list[Mapping[str, Any]], where: str, calls: set[str]) -> None:
    for number, block in enumerate(blocks):
        place, kind = f"{where}.content[{number}]", block["type"]
        if kind == "tool_use":
            turn.calls.append(_call(block, place))
            calls.add(block["id"])
        elif kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise _wrong(f"{place}.thinking", "a string is expected")
            turn.thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":  # that of another server cannot be read
            turn.texts.append(_text(block, place, "text, thinking and tool_use"))


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    name, call_id, given = block.get("name"), block.get("id"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(given, Mapping):
        raise _wrong(where, "a tool_use block with id, name and input, an object, is expected")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def _text(block: Mapping[str, Any], where: str, known: str) -> str:
    if block["type"] != "text":
        message = f"blocks of type {block['type']!r:.100} are not supported here; known are {known}"
        raise _wrong(where, message, "unsupported_content_part")
    if not isinstance(block.get("text"), str):
        raise _wrong(f"{where}.text", "a string is expected")
    text: str = block["text"]
    return text


def _tools(tools: Any, say: Say) -> Any:
    """Tools in the form of a chat, without those of Anthropic; what is no tool stays, and the chat refuses it."""
    if not isinstance(tools, list):
        return tools
    own = [tool for tool in tools if not _is_anthropics(tool)]
    for kind in sorted({tool["type"] for tool in tools if _is_anthropics(tool)}):
        say(f"tools of type {kind!r} have no effect: Anthropic's servers run them, or only Claude knows them")
    return [_tool(tool, f"tools[{number}]") for number, tool in enumerate(own)]


def _is_anthropics(tool: Any) -> bool:
    """Whether a tool has one of the types with a date, such as `web_search_20250305`, or is a toolset of a server."""
    kind = tool.get("type", "custom") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind != "custom"


def _tool(tool: Any, where: str) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(schema, Mapping):
        message = 'a tool such as {"name": "f", "input_schema": {"type": "object"}} is expected'
        raise invalid(f"{where}: {message}", "tools")
    kept = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**kept, "parameters": schema}}


def _tool_choice(choice: Any) -> Any:
    if choice == {}:
        return None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    modes = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in modes:
        raise invalid('tool_choice: {"type": "auto"}, "any", "none" or "tool" with a name is expected', "tool_choice")
    return modes[kind]


def _wrong(where: str, message: str, code: str | None = None) -> APIError:
    return invalid(f"{where}: {message}", "messages", code)
