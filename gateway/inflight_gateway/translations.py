"""Keys that clients of other servers send -> keys of this gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inflight_gateway.errors import invalid
from inflight_gateway.kv_transfer import for_another_server

__all__ = ["CHAT", "COMMON", "COMPLETIONS", "RESPONSES", "THINKING_SWITCHES", "Say", "Translation"]

Say = Callable[[str], None]  # warns of something that is not done

# Reads the value of a key that was removed from the body, and sets other keys of the body.
Translation = Callable[[dict[str, Any], Any, Say], None]

# Variables of chat templates: Qwen's, GLM's and others'; DeepSeek's.
THINKING_SWITCHES = ("enable_thinking", "thinking")
_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")


def _without_effect(key: str, why: str) -> Translation:
    """A key of something that this server does not do, and that does not belong to an answer."""

    def translate(body: dict[str, Any], value: Any, say: Say) -> None:
        if value:
            say(f"{key} has no effect: {why}")

    return translate


def _guided(kind: str) -> Translation:
    """vLLM's older keys: `guided_json` is `structured_outputs` with `json`, and so on."""

    def translate(body: dict[str, Any], value: Any, say: Say) -> None:
        if body.get("structured_outputs"):
            raise invalid(f"guided_{kind}: only one constraint on the answer is possible", f"guided_{kind}")
        body["structured_outputs"] = {kind: value}

    return translate


def _think(body: dict[str, Any], value: Any, say: Say) -> None:
    """Ollama's: a boolean, or an effort."""
    if isinstance(value, bool):
        _switch(body, value)
    elif value in _EFFORTS:
        body.setdefault("reasoning_effort", value)
    else:
        raise invalid(f"think: true, false or one of {', '.join(_EFFORTS)} is expected", "think")


def _thinking(body: dict[str, Any], value: Any, say: Say) -> None:
    """Anthropic's, also of GLM, Kimi and DeepSeek: `{"type": "enabled", "budget_tokens": 1000}`."""
    kind = value.get("type") if isinstance(value, Mapping) else value
    switch = {"enabled": True, "disabled": False, "adaptive": None, "auto": None, True: True, False: False}
    if not isinstance(kind, (str, bool)) or kind not in switch:
        raise invalid('thinking: an object such as {"type": "enabled"} or {"type": "disabled"} is expected', "thinking")
    if switch[kind] is not None:
        _switch(body, bool(switch[kind]))
    if isinstance(value, Mapping) and value.get("budget_tokens") is not None:
        say("thinking.budget_tokens has no effect: reasoning ends where the model ends it")


def _reasoning(body: dict[str, Any], value: Any, say: Say) -> None:
    """OpenRouter's: `{"effort": "low", "enabled": true, "exclude": false, "max_tokens": 1000}`."""
    if not isinstance(value, Mapping):
        raise invalid('reasoning: an object such as {"effort": "low"} is expected', "reasoning")
    effort, enabled = value.get("effort"), value.get("enabled")
    if effort == "none":
        effort, enabled = None, False
    if effort is not None:
        body.setdefault("reasoning_effort", effort)
    if isinstance(enabled, bool):
        _switch(body, enabled)
    if value.get("exclude") is True:
        body["include_reasoning"] = False
    if value.get("max_tokens") is not None:
        say("reasoning.max_tokens has no effect: reasoning ends where the model ends it")


def _switch(body: dict[str, Any], on: bool) -> None:
    """Turn thinking on or off; variables that the body has already stay."""
    given = body.get("chat_template_kwargs")
    if given is None or isinstance(given, Mapping):
        body["chat_template_kwargs"] = {**dict.fromkeys(THINKING_SWITCHES, on), **(given or {})}


def _truncation(body: dict[str, Any], value: Any, say: Say) -> None:
    if value == "auto":
        say("truncation: 'auto' has no effect: an input that is longer than the context is refused")
    elif value != "disabled":
        raise invalid("truncation: 'auto' or 'disabled' is expected", "truncation")


def _chats_limit(body: dict[str, Any], value: Any, say: Say) -> None:
    """`max_completion_tokens` is the name in chats; llm-d's sidecar sends both names everywhere."""
    body["max_tokens"] = value


COMMON: dict[str, Translation] = {
    **{f"guided_{kind}": _guided(kind) for kind in ("json", "regex", "choice", "grammar")},
    "cache_hit_threshold": _without_effect("cache_hit_threshold", "what is not cached is computed"),
    "keep_alive": _without_effect("keep_alive", "models stay loaded"),
    "kv_transfer_params": for_another_server,
    "num_ctx": _without_effect("num_ctx", "the length of the context is the model's"),
    "repetition_detection": _without_effect("repetition_detection", "answers end where the model ends them"),
    "session_id": _without_effect("session_id", "each request is one of its own"),
    "store": _without_effect("store", "nothing is stored"),
    "stream_interval": _without_effect("stream_interval", "text is sent as it comes"),
    "thinking_token_budget": _without_effect("thinking_token_budget", "reasoning ends where the model ends it"),
    "vllm_xargs": _without_effect("vllm_xargs", "no extension reads it"),
}
COMPLETIONS: dict[str, Translation] = {
    **COMMON,
    "max_completion_tokens": _chats_limit,
}
CHAT: dict[str, Translation] = {
    **COMMON,
    "reasoning": _reasoning,
    "think": _think,
    "thinking": _thinking,
}
RESPONSES: dict[str, Translation] = {
    **COMMON,
    "truncation": _truncation,
}
