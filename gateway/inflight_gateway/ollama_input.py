"""Requests of Ollama's API -> chats and completions.

https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import msgspec

from inflight_gateway.bodies import Body
from inflight_gateway.chat_plan import ChatBody
from inflight_gateway.completions import CompletionBody
from inflight_gateway.errors import APIError, invalid
from inflight_gateway.translations import CHAT, COMMON, Say, Translation

__all__ = [
    "OllamaBody",
    "OllamaChatBody",
    "OllamaGenerateBody",
    "OllamaShowBody",
    "chat_of_chat",
    "chat_of_generate",
    "completion_of_generate",
]

# Options of how a model is loaded or computed: they do not belong to a request here.
_LOADING = (
    *("draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_gpu"),
    *("num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
)
# Options of samplers that do not exist here, with the values that turn them off.
_ABSENT_SAMPLERS: dict[str, tuple[float, ...]] = {"mirostat": (0,), "tfs_z": (1,), "typical_p": (1,)}
_WITHOUT_EFFECT = {
    "num_ctx": "the length of the context is the model's",
    "repeat_last_n": "repeat_penalty concerns the whole sequence",
    "penalize_newline": "newlines are penalised like other tokens",
    "mirostat_eta": "there is no mirostat",
    "mirostat_tau": "there is no mirostat",
}


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The options of a request.  None: not given, so the server's default applies."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    num_ctx: Any = None
    repeat_last_n: Any = None
    penalize_newline: Any = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None


class OllamaBody(Body, kw_only=True):
    """The common keys of chats and prompts."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"shift", "truncate"})  # prompts beyond the context are refused
    TRANSLATED: ClassVar[dict[str, Translation]] = {"keep_alive": COMMON["keep_alive"]}
    NESTED: ClassVar[dict[str, Collection[str]]] = {"options": {*OllamaOptions.__struct_fields__, *_LOADING}}

    model: str
    stream: bool | None = None
    format: Any = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """A request to `/api/chat`."""

    messages: Any = None
    tools: Any = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """A request to `/api/generate`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context": (None, []),
        "images": (None, []),
        "template": (None, ""),
    }

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaShowBody(Body, kw_only=True):
    """A request to `/api/show`.  `name`: the older name of `model`."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"options", "system", "template", "verbose"})

    model: str | None = None
    name: str | None = None


def chat_of_chat(body: OllamaChatBody, say: Say) -> ChatBody:
    """A chat.

    Args:
        say: warns of options without an effect.

    Raises:
        APIError: images, samplers that do not exist here, or messages, tools or a format that are not Ollama's.
    """
    return _chat(body, _messages(body.messages), body.tools or None, say)


def chat_of_generate(body: OllamaGenerateBody, say: Say) -> ChatBody:
    """A prompt as a chat, which the model's template renders; otherwise as `chat_of_chat`."""
    messages = [{"role": "user", "content": body.prompt or ""}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return _chat(body, messages, None, say)


def completion_of_generate(body: OllamaGenerateBody, say: Say) -> CompletionBody:
    """A prompt without a template, or with a gap in front of `suffix`; otherwise as `chat_of_chat`."""
    if body.system:
        say("system has no effect: no template renders this prompt")
    if body.think:
        say("think has no effect: no template renders this prompt")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return CompletionBody(prompt=body.prompt or "", suffix=body.suffix, logprobs=logprobs, **_sampling(body, say))


def _chat(body: OllamaBody, messages: list[dict[str, Any]], tools: Any, say: Say) -> ChatBody:
    given: dict[str, Any] = {}
    if body.think is not None:
        CHAT["think"](given, body.think, say)
    return ChatBody(
        messages=messages,
        tools=tools,
        include_reasoning=body.think is not False,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        **_sampling(body, say),
        **given,
    )


def _sampling(body: OllamaBody, say: Say) -> dict[str, Any]:
    """The keys that chats and completions have in common."""
    options = body.options or OllamaOptions()
    for name, off in _ABSENT_SAMPLERS.items():
        value = getattr(options, name)
        if value is not None and value not in off:
            raise invalid(f"options.{name}: {value} came; this sampler is not supported; leave it out", "options")
    for name, why in _WITHOUT_EFFECT.items():
        if getattr(options, name) is not None:
            say(f"options.{name} has no effect: {why}")
    limit = options.num_predict
    return {
        "model": body.model,
        "stream": body.stream,
        "max_tokens": -1 if limit is None or limit <= 0 else limit,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop or None,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "response_format": _response_format(body.format),
    }


def _response_format(format: Any) -> dict[str, Any] | None:
    if format in (None, ""):
        return None
    if format == "json":
        return {"type": "json_object"}
    if isinstance(format, Mapping):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": format}}
    raise invalid('format: "json" or a JSON Schema is expected', "format")


def _messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with OpenAI's calls: Ollama's have no ids, and results follow their calls in order."""
    if not isinstance(messages, list):
        raise invalid('messages: a list of objects such as {"role": "user", "content": "Hi"} is expected', "messages")
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, Any]] = []  # id and name of each call without a result
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise _wrong(where, "an object with role and content is expected")
        if message.get("images"):
            raise _wrong(f"{where}.images", "images are not supported; send text", "unsupported_content_part")
        kept: dict[str, Any] = {
            key: message[key] for key in ("role", "content", "name") if message.get(key) is not None
        }
        if message.get("thinking") is not None:
            kept["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            kept["tool_calls"] = _calls(message["tool_calls"], number, where)
            waiting = [(call["id"], call["function"].get("name")) for call in kept["tool_calls"]]
        if message.get("role") == "tool":
            name = message.get("tool_name") or message.get("name")
            kept["tool_call_id"] = _answered(message.get("tool_call_id"), name, waiting, number)
            if name is not None:
                kept["name"] = name
        found.append(kept)
    return found


def _calls(calls: Any, number: int, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls", "a list of calls is expected")
    found = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise _wrong(
                f"{where}.tool_calls[{index}]",
                'a call such as {"function": {"name": "f", "arguments": {}}} is expected',
            )
        found.append({"id": call.get("id") or _id(number, index), "type": "function", "function": function})
    return found


def _answered(given: Any, name: Any, waiting: list[tuple[str, Any]], number: int) -> Any:
    """The id of the call that a result answers: the given one, that of the tool's first open call, or the next."""
    if given is not None:
        return given
    place = next((place for place, call in enumerate(waiting) if name is not None and call[1] == name), 0)
    return waiting.pop(place)[0] if waiting else _id(number, 0)


def _id(number: int, index: int) -> str:
    return f"{number % 10**5:05}{index % 10**4:04}"  # nine digits: the only form that Mistral's templates accept


def _wrong(where: str, message: str, code: str | None = None) -> APIError:
    return invalid(f"{where}: {message}", where.partition("[")[0], code)
