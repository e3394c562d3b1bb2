"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, with Anthropic's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import msgspec

from inflight_gateway.anthropic.errors import NO_THREADS
from inflight_gateway.bodies import COMMON_IGNORED, Body
from inflight_gateway.errors import invalid
from inflight_gateway.translations import CHAT, Say, Translation

__all__ = ["CountTokensBody", "MessagesBody", "Metadata", "OutputConfig"]


def _thinking(body: dict[str, Any], value: Any, say: Say) -> None:
    """The template's variables, as in chats, and whether the answer shows the reasoning."""
    value = value if isinstance(value, Mapping) else {}
    if value.get("type") == "between_tools":
        value = {**value, "type": "adaptive"}
    CHAT["thinking"](body, value, say)
    body["include_reasoning"] = value["type"] != "disabled" and value.get("display") != "omitted"


def _context_management(body: dict[str, Any], value: Any, say: Say) -> None:
    if value:
        say("context_management has no effect: the conversation is rendered as it is")


def _thread(body: dict[str, Any], value: Any, say: Say) -> None:
    raise invalid("thread is not supported: send the whole conversation in messages", "thread", NO_THREADS)


class Metadata(msgspec.Struct):
    """`user_id`: the tenant, unless a header names it."""

    user_id: str | None = None


class OutputConfig(msgspec.Struct):
    """`effort`: passed to the template; `format`: a JSON Schema that the answer's text validates against."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensBody(Body, kw_only=True):
    """The keys that make up a prompt."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "compaction": (None,),
        "container": (None,),
        "mcp_servers": (None, []),
    }
    # These concern caching (prefixes are always cached), billing or routing at Anthropic.
    IGNORED: ClassVar[frozenset[str]] = COMMON_IGNORED.union(
        {
            *("betas", "billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "fallbacks"),
            *("inference_geo", "service_tier", "speed", "user_profile_id", "workspace_id"),
        }
    )
    TRANSLATED: ClassVar[dict[str, Translation]] = {
        "context_management": _context_management,
        "thinking": _thinking,
        "thread": _thread,
    }
    NESTED: ClassVar[dict[str, Collection[str]]] = {
        "metadata": Metadata.__struct_fields__,
        "output_config": OutputConfig.__struct_fields__,
    }

    messages: Any
    model: str | None = None
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """A request for a message."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # vLLM's
    cache_salt: str | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    seed: int | None = None
