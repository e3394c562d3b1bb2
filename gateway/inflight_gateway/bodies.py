"""Request bodies: JSON within limits, as typed structs with OpenAI's names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from inflight_client.request import SamplingOptions
from inflight_gateway.errors import APIError, invalid
from inflight_gateway.gateway import Gateway
from inflight_gateway.kv_transfer import KVTransferParams
from inflight_gateway.options import GatewayOptions
from inflight_gateway.response_headers import warn
from inflight_gateway.translations import Translation

__all__ = ["COMMON_IGNORED", "Body", "SamplingBody", "StreamOptions", "parse_body", "read_body", "sampling_options"]

_BodyT = TypeVar("_BodyT", bound="Body")

_MISSING = re.compile(r"missing required field `(?P<key>\w+)`")
_PATH = re.compile(r" - at `\$(?P<path>.*)`$")
_MAX_SHOWN = 100  # characters of a key
_CONTAINERS = frozenset({dict, list})
_CONTAINER_ITEMS = 10  # values as which an object or a list counts, by the time that each takes
_MAX_UNKNOWN = 100  # unknown keys of an object
_MAX_HINTS = 8  # keys for which a similar one is looked for, which takes a tenth of a millisecond


# Keys that do not change an answer: prefixes are always cached, and Codex describes itself.
COMMON_IGNORED = frozenset({"cache_prompt", "client_metadata"})


class Body(msgspec.Struct, kw_only=True):
    """A request body.  Its fields are the keys that have an effect.

    Attributes:
        UNSUPPORTED: known keys without support, with the values that do not ask for it; any other value is refused.
        IGNORED: known keys that do not change the answer.
        TRANSLATED: keys of other servers' clients, each with the function that sets the keys of this body.
        NESTED: keys whose values are objects, with the known keys of these.
    """

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    TRANSLATED: ClassVar[dict[str, Translation]] = {}
    NESTED: ClassVar[dict[str, Collection[str]]] = {}


class StreamOptions(msgspec.Struct):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; none is added


class SamplingBody(Body, kw_only=True):
    """The common keys of completions and chats.  None: not given, so the server's default applies."""

    NESTED: ClassVar[dict[str, Collection[str]]] = {"stream_options": StreamOptions.__struct_fields__}

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: KVTransferParams | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)


# Fields that the client's options have under the same name.
_SAME = (*(name for name in SamplingBody.__struct_fields__ if name in SamplingOptions.__annotations__), "cache_salt")


def sampling_options(body: SamplingBody) -> dict[str, Any]:
    """The given keys of `SamplingBody`, as options of `AsyncClient.stream`."""
    options = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if options.get("top_p") == 0:  # OpenAI takes 0: the most likely token alone
        del options["top_p"]
        options["top_k"] = 1
    if body.priority is not None:
        options["request_priority"] = body.priority
    return options


async def read_body(http: Request, kind: type[_BodyT], gateway: Gateway) -> _BodyT:
    """Read and check the body of a request.

    Keys that are null count as not given.  Numbers and booleans can be strings, and whole numbers can have a fraction
    of zero.  A warning names unknown keys; with `strict` they are refused.

    Raises:
        APIError: as `BodyReader.read`, or 400: not JSON, too deep, an unsupported key, a wrong type.
    """
    return parse_body(await gateway.bodies.read(http), kind, gateway.options, http.scope)


def parse_body(raw: bytes, kind: type[_BodyT], options: GatewayOptions, scope: Scope) -> _BodyT:
    """As `read_body`, for bytes."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep(options.max_body_depth) from None
    if not isinstance(value, dict):
        raise invalid(f"the body is {_json_type(value)}; a JSON object is expected")
    _check_size(value, options)
    value = {key: one for key, one in value.items() if one is not None}
    _translate(value, kind, scope)
    _check_keys(value, kind, options, scope)
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _mistyped(error) from None


def _check_size(value: Any, options: GatewayOptions) -> None:
    """Raise an error unless depth and number of values are within the limits."""
    level, items = [value], 1
    for _ in range(options.max_body_depth + 1):
        if not level:
            return
        below: list[Any] = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            items += len(container)
            if not _CONTAINERS.isdisjoint(map(type, values)):
                below += [one for one in values if type(one) in _CONTAINERS]
        items += (_CONTAINER_ITEMS - 1) * len(below)
        if items > options.max_body_items:
            raise invalid(
                f"the body has more than {options.max_body_items} values, each object or list in it counted as "
                f"{_CONTAINER_ITEMS}; fewer are expected (max_body_items)"
            )
        level = below
    raise _too_deep(options.max_body_depth)


def _too_deep(limit: int) -> APIError:
    return invalid(f"the body is nested more than {limit} levels deep; at most {limit} are allowed (max_body_depth)")


def _translate(value: dict[str, Any], kind: type[Body], scope: Scope) -> None:
    """Replace keys of other servers' clients, and warn of those without an effect."""

    def say(message: str) -> None:
        warn(scope, "ignored", message)

    for key in [key for key in value if key in kind.TRANSLATED]:
        kind.TRANSLATED[key](value, value.pop(key), say)


def _check_keys(value: dict[str, Any], kind: type[Body], options: GatewayOptions, scope: Scope) -> None:
    """Refuse unsupported keys, warn of unknown ones, and remove keys without an effect from `value`."""
    fields = kind.__struct_fields__
    unknown = []
    for key in [key for key in value if key not in fields]:
        if key in kind.UNSUPPORTED:
            if not any(value[key] == off and type(value[key]) is type(off) for off in kind.UNSUPPORTED[key]):
                raise invalid(f"{key} is not supported; leave it out", key, "unsupported_parameter")
        elif key not in kind.IGNORED:
            unknown.append(key)
        del value[key]
    _unknown("", unknown, (*fields, *kind.UNSUPPORTED, *kind.IGNORED), options, scope)
    for name, known in kind.NESTED.items():
        inner = value.get(name)
        if isinstance(inner, dict):
            _unknown(name, [key for key in inner if key not in known], (), options, scope)


def _unknown(within: str, keys: list[str], known: Collection[str], options: GatewayOptions, scope: Scope) -> None:
    """Warn of unknown keys, or refuse them.

    Args:
        within: the key of the object that has them; "": the body.
        known: keys that could have been meant.
    """
    if len(keys) > _MAX_UNKNOWN:
        where = within or "the body"
        raise invalid(
            f"{where} has {len(keys)} unknown parameters; at most {_MAX_UNKNOWN} are ignored, so leave them out",
            within or None,
            "unknown_parameter",
        )
    for place, key in enumerate(keys):
        short = key[:_MAX_SHOWN]
        near = difflib.get_close_matches(short, known, n=1) if place < _MAX_HINTS else []
        shown = repr(f"{within}.{short}" if within else short)
        if options.strict:
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise invalid(f"unknown parameter {shown}; {hint}", within or short, "unknown_parameter")
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        warn(scope, "unknown_key", f"unknown parameter {shown} was ignored{hint}")


def _mistyped(error: msgspec.ValidationError) -> APIError:
    text = str(error)
    found = _PATH.search(text)
    path = found["path"].lstrip(".") if found else ""
    if not path and (missing := _MISSING.search(text)):
        return invalid(f"{missing['key']} is missing; it is required", missing["key"], "missing_required_parameter")
    what = text[: found.start()] if found else text
    return invalid(f"{path}: {what}" if path else what, re.split(r"[.\[]", path)[0] or None)


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
