"""A chat request -> the request to Triton, and how to parse the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request

from inflight_gateway.answers import AnswerParser
from inflight_gateway.arguments import base_arguments
from inflight_gateway.bodies import COMMON_IGNORED, SamplingBody
from inflight_gateway.chat_messages import template_messages, unusual_roles
from inflight_gateway.chat_tools import ToolPlan, plan_tools
from inflight_gateway.default_tools import DEFAULT_FORMAT, with_tools
from inflight_gateway.errors import invalid
from inflight_gateway.gateway import Gateway
from inflight_gateway.legacy_functions import messages_with_tools, tool_choice_of, tools_of
from inflight_gateway.length_limit import LengthLimit
from inflight_gateway.reasoning import ReasoningParser, reasoning_opened
from inflight_gateway.reasoning_formats import reasoning_tags
from inflight_gateway.reasoning_tokens import ReasoningTokens, reasoning_token_ids
from inflight_gateway.request_templates import TEMPLATE_KEYS, RequestTemplate, check_request_template
from inflight_gateway.response_format import behind_reasoning, body_constraint, calls_or
from inflight_gateway.response_headers import warn
from inflight_gateway.tool_parsers import FORMATS, format_named
from inflight_gateway.translations import CHAT, THINKING_SWITCHES, Translation
from inflight_gateway.upstream import ServedModel

__all__ = ["ChatBody", "ChatPlan", "plan_chat"]

_TEMPLATE_ARGUMENTS = ("messages", *TEMPLATE_KEYS)


class ChatBody(SamplingBody, kw_only=True):
    """A chat request."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "add_special_tokens": (None, False),  # the template writes them
        "audio": (None,),
        "length_penalty": (None, 1, 1.0),
        "logprob_token_ids": (None, []),
        "modalities": (None, [], ["text"]),
        "moderation": (None,),
        "prediction": (None,),
        "spaces_between_special_tokens": (None, True),
        "truncation_side": (None, "left"),
        "use_beam_search": (None, False),
        "web_search_options": (None,),
        # vllm-router sends these with every chat.
        "no_stop_trim": (None, False),
        "return_hidden_states": (None, False),
        "separate_reasoning": (None, True),
        "stream_reasoning": (None, True),
    }
    # These concern billing, storage, caching or routing at OpenAI.  `verbosity` is only a hint.
    IGNORED: ClassVar[frozenset[str]] = COMMON_IGNORED.union(
        {
            "metadata",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "verbosity",
        }
    )

    TRANSLATED: ClassVar[dict[str, Translation]] = CHAT

    messages: Any
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def ids_as_tokens(self) -> bool:
        """Whether log probabilities name tokens by their ids."""
        return bool(self.return_tokens_as_token_ids)


@dataclass(frozen=True)
class ChatPlan:
    """An interpreted chat request.

    Attributes:
        arguments: of `AsyncClient.stream`, without a request id.
        limit: the length that the caller asks for.
        tools: how tools are used; None if none can be called.
        tags: around the model's reasoning, if the answer can contain some.
        opened: whether the answer begins within the tags.
        show_reasoning: whether the caller gets the reasoning.
        echo: text of the last message, which the answer repeats.
        tag_ids: the tokens of `tags`, if each tag is one token.
        prompt_token_ids: of the rendered chat, if the caller wants token ids.
    """

    arguments: dict[str, Any]
    limit: LengthLimit
    tools: ToolPlan | None
    tags: tuple[str, str] | None
    opened: bool
    show_reasoning: bool
    echo: str = ""
    tag_ids: tuple[int, int] | None = None
    prompt_token_ids: list[int] | None = None

    def parser(self) -> AnswerParser:
        """A parser for one of the n answers."""
        return AnswerParser(
            None if self.tags is None else ReasoningParser(self.tags, self.opened),
            None if self.tools is None else self.tools.parser(),
            only_calls=self.tools is not None and self.tools.required,
        )

    def reasoning_tokens(self) -> ReasoningTokens | None:
        """A counter of reasoning tokens in all n answers; None if they cannot be identified."""
        return None if self.tag_ids is None else ReasoningTokens(self.tag_ids, self.opened)


async def plan_chat(gateway: Gateway, http: Request, model: ServedModel, body: ChatBody) -> ChatPlan:
    """Check a request and decide what to ask of the model.

    Raises:
        APIError: the request is not valid, or the model cannot chat.
    """
    if "messages" not in model.inputs:
        raise invalid(
            f"model {model.name!r} takes no messages: its backend renders no chat template; use /v1/completions",
            "model",
        )
    _check(body)
    check_request_template(gateway.options, body.chat_template)
    body = _with_tools(body)
    format = _tool_format(gateway, model)
    tools = plan_tools(body.tools, body.tool_choice, body.parallel_tool_calls, format or DEFAULT_FORMAT)
    tags, opened = await _reasoning(gateway, model, body)
    arguments = base_arguments(gateway, http, model, body)
    limit = _limit(body, model)
    arguments["max_tokens"] = limit.longest(model) if limit.tokens is None else limit.tokens  # as in OpenAI's API
    arguments |= _logprobs(body) | _template(body)
    template = RequestTemplate(body.chat_template, model.info)
    arguments |= await _described(gateway, model, template, arguments["messages"], tools, format)
    constraint = _constraint(body, tools)
    if constraint is not None:
        arguments["structured_outputs"] = constraint if tags is None else behind_reasoning(constraint, tags, opened)
    marks = [*(tags or ()), *(FORMATS[tools.format].MARKS if tools else ())]
    if any(mark in model.info.get("special_tokens", ()) for mark in marks):
        arguments["skip_special_tokens"] = False  # the parsers must see them
    ids = await _prompt_ids(gateway, model, arguments) if body.return_token_ids else None
    tag_ids = None if tags is None else reasoning_token_ids(tags, model.info)
    for role in unusual_roles(arguments["messages"]):
        warn(http.scope, "ignored", f"the role {role!r} has an effect only if the model's chat template knows it")
    echo = _last_content(body.messages) if body.echo and arguments["messages"][-1]["role"] == "assistant" else ""
    return ChatPlan(arguments, limit, tools, tags, opened, body.include_reasoning is not False, echo, tag_ids, ids)


def _with_tools(body: ChatBody) -> ChatBody:
    """The body with tools in the place of functions."""
    body = msgspec.structs.replace(body, messages=messages_with_tools(body.messages))
    if body.functions is None:
        if body.function_call not in (None, "auto", "none"):
            raise invalid("function_call: there are no functions; give some in functions", "function_call")
        return body
    if body.tools is not None:
        raise invalid("functions: give it or tools, not both", "functions")
    tools, choice = tools_of(body.functions), tool_choice_of(body.function_call)
    return msgspec.structs.replace(body, tools=tools, tool_choice=choice, parallel_tool_calls=False)


async def _prompt_ids(gateway: Gateway, model: ServedModel, arguments: dict[str, Any]) -> list[int]:
    names = (*_TEMPLATE_ARGUMENTS, "truncate_prompt_tokens")
    chat = {name: arguments[name] for name in names if name in arguments}
    ids: list[int] = (await gateway.upstream.tokenize(model, **chat))["tokens"]
    return ids


def _check(body: ChatBody) -> None:
    """Raise an error for values that exclude each other."""
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs are not part of a stream; leave out one of the two", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options are for requests with stream: true", "stream_options")
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid(
            "continue_final_message: it excludes add_generation_prompt; set that to false", "continue_final_message"
        )


async def _described(
    gateway: Gateway,
    model: ServedModel,
    template: RequestTemplate,
    messages: list[dict[str, Any]],
    tools: ToolPlan | None,
    format: str | None,
) -> dict[str, Any]:
    """Tools for the template, or messages that contain them."""
    described = [] if tools is None else tools.described
    has_tools = template.takes_tools
    if format in (None, DEFAULT_FORMAT) and (not has_tools or (format is None and described)):
        in_system = bool(described) and await template.takes_system_messages(gateway.upstream, model)
        return {"messages": with_tools(messages, described, in_system)}
    return {"tools": described} if described else {}


def _tool_format(gateway: Gateway, model: ServedModel) -> str | None:
    chosen = gateway.options.tool_call_parser or model.info.get("tool_format")
    return format_named(chosen) if chosen else None


async def _reasoning(gateway: Gateway, model: ServedModel, body: ChatBody) -> tuple[tuple[str, str] | None, bool]:
    """The tags that the answer can contain, and whether it begins within them."""
    tags = reasoning_tags(gateway.options.reasoning_parser, model.info)
    if tags is None:
        return None, False
    if body.continue_final_message:
        _, begun, behind = _last_content(body.messages).rpartition(tags[0])
        within = bool(begun) and tags[1] not in behind
        return (tags, True) if within else (None, False)
    own = {} if body.chat_template is None else {"chat_template": body.chat_template}
    return tags, await reasoning_opened(gateway.upstream, model, tags[0], _template_kwargs(body), own)


def _last_content(messages: Any) -> str:
    last = messages[-1] if isinstance(messages, list) and messages else None
    content = last.get("content") if isinstance(last, Mapping) else None
    return content if isinstance(content, str) else ""


def _limit(body: ChatBody, model: ServedModel) -> LengthLimit:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return LengthLimit.of(name, getattr(body, name), model)


def _logprobs(body: ChatBody) -> dict[str, Any]:
    if not body.logprobs:
        if body.top_logprobs:
            raise invalid("top_logprobs: logprobs must be true beside it", "top_logprobs")
        return {}
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise invalid(f"top_logprobs: {body.top_logprobs} came; at least 0 is expected", "top_logprobs")
    return {"logprobs": body.top_logprobs or 0}


def _template(body: ChatBody) -> dict[str, Any]:
    """The options for the chat template."""
    found: dict[str, Any] = {"messages": template_messages(body.messages)}
    if body.add_generation_prompt is not None:
        found["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        found["continue_final_message"] = True
    if body.chat_template is not None:
        found["chat_template"] = body.chat_template
    if options := _template_kwargs(body):
        found["chat_template_kwargs"] = options
    return found


def _template_kwargs(body: ChatBody) -> dict[str, Any]:
    """The variables of the template.  An effort turns thinking on, or off ("none"), unless the body has a switch."""
    own = body.chat_template_kwargs or {}
    given: dict[str, Any] = {"reasoning_effort": body.reasoning_effort, "documents": body.documents}
    if body.reasoning_effort is not None and not any(name in own for name in THINKING_SWITCHES):
        given |= dict.fromkeys(THINKING_SWITCHES, body.reasoning_effort != "none")
    return {name: value for name, value in given.items() if value is not None} | own


def _constraint(body: ChatBody, tools: ToolPlan | None) -> dict[str, Any] | None:
    """The constraint on the answer, without its reasoning."""
    response = body_constraint(body.response_format, body.structured_outputs)
    if tools is None or response is None:
        return response if tools is None else tools.constraint()
    return tools.calls() if tools.required else calls_or(tools.calls(), response)
