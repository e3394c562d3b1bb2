"""Converts `/v1/responses` to a chat: input items to messages, tools, text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from inflight_gateway.bodies import COMMON_IGNORED, SamplingBody
from inflight_gateway.chat_messages import text_of
from inflight_gateway.chat_plan import ChatBody
from inflight_gateway.errors import APIError, invalid
from inflight_gateway.translations import RESPONSES, Say, Translation

__all__ = ["ResponsesBody", "chat_of_responses"]

_ROLES = ("system", "developer", "user", "assistant")
# Beginnings of the types of tools that are no functions of the client; some types end with a date.
_HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "custom", "file_search", "image_generation", "local_shell"),
    *("mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search", "web_search"),
)
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # reasoning is returned in plain text anyway


class ResponsesBody(SamplingBody, kw_only=True):
    """A request for a response.  Nothing is stored, so each request contains the whole conversation in `input`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": (None,),
        "background": (None, False),
        "background_options": (None,),
        "context_management": (None, []),
        "conversation": (None,),
        "image": (None,),
        "moderation": (None,),
        "previous_response_id": (None,),
        "prompt": (None,),
    }
    IGNORED: ClassVar[frozenset[str]] = COMMON_IGNORED.union(
        {
            "max_tool_calls",  # of tools that a server runs itself
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
        }
    )

    TRANSLATED: ClassVar[dict[str, Translation]] = RESPONSES

    input: Any
    instructions: str | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def chat_of_responses(body: ResponsesBody, say: Say) -> ChatBody:
    """The same request as a chat.

    Args:
        body: of the request.
        say: warns of tools that OpenAI's servers run, which are left out, and of what is to be included of them.

    Raises:
        APIError: an item, a tool or an option that is not supported; it says which.
    """
    if body.n not in (None, 1):
        raise invalid(f"n: {body.n} came; a response has one answer", "n")
    if body.max_tokens is not None:
        raise invalid("max_tokens: the name here is max_output_tokens", "max_tokens")
    for name in ("prompt_logprobs", "return_token_ids"):
        if getattr(body, name):
            raise invalid(f"{name}: a response has no place for them; /v1/chat/completions does", name)
    include = body.include or []
    for name in include:
        if name not in _INCLUDED:
            say(f"include: {name!r:.100} has no effect: it is of tools that are not run here, or of images")
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    effort = (body.reasoning or {}).get("effort")
    common = {name: getattr(body, name) for name in SamplingBody.__struct_fields__}
    return ChatBody(
        **{**common, "stream_options": None},
        messages=[*system, *_messages(body.input)],
        tools=_tools(body.tools, say),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=(body.text or {}).get("format"),
        max_completion_tokens=body.max_output_tokens,
        logprobs=_LOGPROBS in include or bool(body.top_logprobs),
        top_logprobs=body.top_logprobs,
        reasoning_effort=effort if isinstance(effort, str) else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _messages(items: Any) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise invalid("input: a text or a list of items is expected", "input")
    messages: list[dict[str, Any]] = []
    thought = ""
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "reasoning":
            thought = _thought(item, where)
        elif kind == "message":
            messages.append(_message(item, where))
        elif kind == "function_call":
            if thought or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "function_call_output":
            call_id = item.get("call_id")
            if not isinstance(call_id, str):
                raise _wrong(f"{where}.call_id", "the id of a call is expected")
            content = text_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            known = "message, function_call, function_call_output and reasoning"
            raise _wrong(where, f"items of type {kind!r} are not supported; known are {known}", "unsupported_item")
        if thought and kind != "reasoning":
            if messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = thought
            thought = ""
    return messages


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"{role!r} came; one of {', '.join(_ROLES)} is expected")
    return {"role": role, "content": text_of(item.get("content"), f"{where}.content")}


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    name, call_id = item.get("name"), item.get("call_id")
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise _wrong(where, "a function_call with call_id, name and arguments is expected")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": item.get("arguments")}}


def _thought(item: Mapping[str, Any], where: str) -> str:
    """The text of a reasoning item: the reasoning, or else its summary."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise _wrong(where, "a reasoning item with a list of contents is expected")
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _tools(tools: Any, say: Say) -> Any:
    """Function tools in the form of a chat, without hosted ones; other tools unchanged: the chat refuses them."""
    if not isinstance(tools, list):
        return tools
    for kind in sorted({tool["type"] for tool in tools if _is_hosted(tool)}):
        say(f"tools of type {kind!r} have no effect: they run on OpenAI's servers, or are not described to the model")
    keys = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}
        if isinstance(tool, Mapping) and tool.get("type") == "function"
        else tool
        for tool in tools
        if not _is_hosted(tool)
    ]


def _is_hosted(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind.startswith(_HOSTED)


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        listed = [_tool_choice(tool) for tool in choice["tools"] if not _is_hosted(tool)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}
    return choice


def _wrong(where: str, message: str, code: str | None = None) -> APIError:
    return invalid(f"{where}: {message}", "input", code)
