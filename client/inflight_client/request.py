"""A request, validated and not yet encoded."""

from __future__ import annotations

import difflib
import json
import uuid
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import numpy as np

from inflight_client.schemas import json_schema_of

__all__ = [
    "ChatOptions",
    "GenerationRequest",
    "Message",
    "RequestOptions",
    "SamplingOptions",
    "chat_of",
    "check_one_prompt",
    "checked_ids",
    "messages_json",
]

_MAX_TIMEOUT = 1e9  # seconds; ten times as many would overflow gRPC's nanoseconds

Message = Mapping[str, Any]

_TEXTS = {"model", "adapter", "request_id", "tenant", "cache_salt", "routing_key"}


class ChatOptions(TypedDict, total=False):
    """Options of the chat template, for `messages`.

    Attributes:
        tools: as in OpenAI's API: the template describes them to the model.
        chat_template_kwargs: further variables of the template, such as {"enable_thinking": False}.
        add_generation_prompt: end the prompt where the assistant's answer begins; True unless the next is set.
        continue_final_message: continue the last message instead of answering it.  A string names the field of the
            message to continue, such as "reasoning_content".
        chat_template: Jinja source that replaces the model's template; only for models with
            `trust_request_chat_template`.
    """

    tools: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool | str
    chat_template: str


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters under vLLM's names.  The server validates them and applies its defaults to missing ones
    (`max_tokens` 16, temperature 1)."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    n: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    truncate_prompt_tokens: int
    structured_outputs: Mapping[str, Any]


class RequestOptions(SamplingOptions, ChatOptions, total=False):
    """Keyword arguments of `generate` and `stream`.  Options that are not given are not sent.

    Attributes:
        max_tokens ... structured_outputs: see `SamplingOptions`.
        tools, chat_template_kwargs, add_generation_prompt, continue_final_message, chat_template: see `ChatOptions`.
        json_schema: the schema of the output, which is then JSON: a dict or JSON text, a pydantic model or a dataclass.
            Short for `structured_outputs={"json": schema}`; its other keys are `regex`, `choice`, `grammar` and more.
        extra_parameters: further sampling parameters of a newer server, by their wire names.
        model: overrides the client's.
        adapter: name of the LoRA adapter that computes the output.  Another server continues a broken stream only if
            the name stands for the same content there.
        request_id: appears in the server's traces; generated if not given.
        request_priority: lower values are served first.
        tenant: the account that the request is charged to.
        cache_salt: restricts prefix cache hits to requests with the same salt.
        routing_key: distinguishes requests with equal beginnings, for a client with `routing`: the name of a
            conversation keeps it on one server.  It is not sent.
        timeout: seconds after which the server ends the stream with a deadline error, and retries stop.  None removes
            the client's default.
        one_response: return the whole output in one response: fewer messages, but no TTFT.
        return_token_ids: False saves bytes if only text is needed.
        return_cumulative_logprob: makes the server compute log probabilities for every token.
        return_num_cached_tokens: makes `Usage.cached_tokens` known.
        return_stop_reason: makes `Choice.stop_reason` known.
        resume_token_ids: output of an earlier request with the same options and seed: the answer continues it.  For
            n > 1 one list per sequence, None for a sequence that has ended.
        resume_cumulative_logprob: sums of the log probabilities of that output, one per sequence.
        trace_headers: the span that the request belongs to, as `traceparent` and `tracestate` of W3C Trace Context:
            what `opentelemetry.propagate.inject` puts into a dict.
        pooling: asks for vectors, in the place of a prompt and of sampling parameters: the JSON object of the input
            `pooling` (docs/wire-contract.md).  The stream has no chunks; `Stream.pooled` is the response.
    """

    json_schema: Any
    extra_parameters: Mapping[str, Any]
    model: str
    adapter: str
    request_id: str
    request_priority: int
    tenant: str
    cache_salt: str
    routing_key: str
    timeout: float | None
    one_response: bool
    return_token_ids: bool
    return_cumulative_logprob: bool
    return_num_cached_tokens: bool
    return_stop_reason: bool
    resume_token_ids: Sequence[int] | Sequence[Sequence[int] | None]
    resume_cumulative_logprob: Sequence[float]
    trace_headers: Mapping[str, str]
    pooling: Mapping[str, Any]


# Sent as `sampling_parameters`, and along with the messages.
_SAMPLING, _CHAT = tuple(SamplingOptions.__annotations__), tuple(ChatOptions.__annotations__)
_SAMPLING_NAMES = frozenset(_SAMPLING)
_SCALARS = (str, bool, int, float, type(None))


@dataclass(frozen=True)
class GenerationRequest:
    """A request with exactly one of `prompt`, `messages`, `input_ids` and `pooling`.

    Attributes:
        chat: options of the chat template, for `messages`.
        sampling: the JSON object of `sampling_parameters`.
        timeout: seconds until the deadline, counted from the first attempt; None: no deadline.
        stream: whether text is sent as it is generated, rather than in one response at the end.
        return_log_probs: ask for the log probability of each token, as a number.
        return_adapter_digest: ask for the content of the adapter.
        adapter_digest: the content that the adapter must have.
        return_checkpoint_id: ask which checkpoint computes the output.
        resume_token_ids: one list per sequence, None for one that has ended.
        Others: as in `RequestOptions`.
    """

    model: str
    prompt: str | None = None
    messages: Sequence[Message] | None = None
    chat: dict[str, Any] = field(default_factory=dict)
    input_ids: list[int] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    request_id: str = ""
    request_priority: int | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    routing_key: str | None = None
    timeout: float | None = None
    stream: bool = True
    return_token_ids: bool = True
    return_cumulative_logprob: bool = False
    return_num_cached_tokens: bool = False
    return_stop_reason: bool = False
    return_log_probs: bool = False
    return_adapter_digest: bool = False
    adapter_digest: str | None = None
    return_checkpoint_id: bool = False
    resume_token_ids: list[list[int] | None] | None = None
    resume_cumulative_logprob: list[float] | None = None
    trace_headers: dict[str, str] = field(default_factory=dict)
    pooling: Mapping[str, Any] | None = None

    @property
    def n(self) -> int:
        """Number of requested sequences, or of inputs of `pooling`; 1 for a value that the server will reject."""
        if self.pooling is not None:
            return max(1, len(self.pooling["inputs"]))
        n = next((self.sampling[name] for name in ("n", "num_return_sequences") if self.sampling.get(name)), 1)
        try:
            return max(1, int(float(n)))  # the server also accepts 2.0 and "2"
        except (TypeError, ValueError, OverflowError):
            return 1

    def changed(self, **fields: Any) -> GenerationRequest:
        """As `dataclasses.replace`, which takes ten times as long for so many fields; their names are not checked."""
        found = object.__new__(GenerationRequest)
        vars(found).update(vars(self), **fields)
        return found

    @classmethod
    def build(
        cls,
        prompt: str | None,
        messages: Sequence[Message] | None,
        input_ids: Sequence[int] | np.ndarray | None,
        options: RequestOptions,
        *,
        model: str,
        timeout: float | None,
    ) -> GenerationRequest:
        """Validate the arguments of `generate`; `model` and `timeout` are the client's defaults.

        Raises:
            TypeError: an unknown option (the message suggests the closest one), or a value of the wrong type.
            ValueError: not exactly one prompt, an option of the chat template without messages, a string that cannot be
                encoded as UTF-8, a timeout that is not positive, or an integer out of the range of its data type.
        """
        rest: dict[str, Any] = dict(options)
        prompts = {"prompt": prompt, "messages": messages, "input_ids": input_ids}
        pooling = rest.pop("pooling", None)
        check_one_prompt(prompts if pooling is None else {**prompts, "pooling": pooling})
        sampling = {name: rest.pop(name) for name in list(rest) if name in _SAMPLING_NAMES}
        if (described := rest.pop("json_schema", None)) is not None:
            sampling["structured_outputs"] = {
                **sampling.get("structured_outputs", {}),
                "json": json_schema_of(described),
            }
        sampling |= rest.pop("extra_parameters", {})
        chat = chat_of({name: rest.pop(name) for name in _CHAT if name in rest}, messages)
        timeout = rest.pop("timeout", timeout)
        if timeout is not None and not 0 < timeout <= _MAX_TIMEOUT:
            raise ValueError(f"timeout={timeout!r}: must be above 0 and at most 1e9 seconds, or None")
        for name, text in (("model", rest.get("model", model)), *rest.items()):
            if name in _TEXTS and text is not None:
                _check_text(name, text)
        _check_integers("request_priority", [rest.get("request_priority", 0)], 32)
        ids = None if input_ids is None else checked_ids("input_ids", input_ids)
        rest |= _resumed(rest)
        rest["trace_headers"] = _trace_headers(rest.get("trace_headers") or {})
        known = RequestOptions.__annotations__
        for name in rest:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = (
                    f"did you mean {near[0]!r}?"
                    if near
                    else "sampling parameters with other names belong in extra_parameters"
                )
                raise TypeError(f"unknown option {name!r}; {hint}")
        return cls(
            model=rest.pop("model", model),
            prompt=prompt,
            messages=messages,
            chat=chat,
            input_ids=ids,
            sampling={name: _plain(value) for name, value in sampling.items()},
            request_id=rest.pop("request_id", "") or uuid.uuid4().hex,
            timeout=timeout,
            stream=not rest.pop("one_response", False) and pooling is None,
            pooling=pooling if pooling is None else _checked_pooling(pooling, [*sampling, *chat]),
            **rest,
        )


def _checked_pooling(pooling: Mapping[str, Any], others: Sequence[str]) -> dict[str, Any]:
    """The request for vectors; `others` are options that only requests for text have."""
    if others:
        raise ValueError(f"{' and '.join(others)}: only for text; pooling has its own keys")
    inputs = pooling["inputs"]
    for i, entry in enumerate(inputs):
        for text in entry if isinstance(entry, (list, tuple)) else [entry]:
            if not isinstance(text, int):
                _check_text(f"inputs[{i}]", text)
    for name, value in pooling.items():
        if isinstance(value, str):
            _check_text(name, value)
    return dict(pooling)


def check_one_prompt(prompts: Mapping[str, Any]) -> None:
    """Raise ValueError unless exactly one is given, TypeError if it has the wrong type."""
    given = [name for name, value in prompts.items() if value is not None]
    if len(given) != 1:
        names = list(prompts)
        allowed = f"{', '.join(names[:-1])} and {names[-1]}"
        raise ValueError(f"give exactly one of {allowed}, not {' and '.join(given) or 'none'}")
    if given == ["prompt"]:
        _check_text("prompt", prompts["prompt"])
    if given == ["messages"]:
        _check_messages(prompts["messages"])


def chat_of(options: Mapping[str, Any], messages: Any) -> dict[str, Any]:
    """The options of the chat template that are set.

    Raises:
        ValueError: there are options, but no messages.
        TypeError: an unknown option.
    """
    chat = {name: _plain(value) for name, value in options.items() if value is not None}
    for name in chat.keys() - set(_CHAT):
        raise TypeError(f"unknown option {name!r}; allowed are {', '.join(_CHAT)}")
    if chat and messages is None:
        raise ValueError(f"{' and '.join(chat)}: only for messages, which a chat template renders")
    return chat


def checked_ids(name: str, token_ids: Sequence[int] | np.ndarray) -> list[int]:
    """Token ids as a list; raises TypeError or ValueError for values that are no INT64.

    An array checks them ten times as fast as a loop, which would hold up an event loop: a prompt can have a million.
    """
    try:
        return array("q", list(token_ids)).tolist()
    except OverflowError:
        raise _no_integers(name, 64) from None


def messages_json(messages: Sequence[Message], chat: Mapping[str, Any]) -> str:
    """The input `messages`: an object if there are options of the chat template, else a list."""
    plain = [dict(message) for message in messages]
    return json.dumps({"messages": plain, **chat} if chat else plain)


def _resumed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given resume options: `resume_token_ids` as a list per sequence, and the sums as floats."""
    found: dict[str, Any] = {}
    if (given := options.get("resume_token_ids")) is not None:
        entries = list(given)
        if not any(entry is None or hasattr(entry, "__iter__") for entry in entries):
            entries = [entries]
        found["resume_token_ids"] = [
            None if entry is None else checked_ids("resume_token_ids", entry) for entry in entries
        ]
    if (sums := options.get("resume_cumulative_logprob")) is not None:
        found["resume_cumulative_logprob"] = [float(value) for value in sums]
    return found


def _trace_headers(given: Mapping[str, str]) -> dict[str, str]:
    """The headers that Trace Context defines, in lower case; propagators of other standards can add more.

    Raises:
        ValueError: one is not printable ASCII.
    """
    if not given:
        return {}
    found = {name.lower(): value for name, value in given.items()}
    headers = {name: found[name] for name in ("traceparent", "tracestate") if found.get(name)}
    for name, value in headers.items():
        if not (isinstance(value, str) and value.isascii() and value.isprintable()):
            raise ValueError(f"trace_headers: {name}={value!r} must be printable ASCII")
    return headers


def _check_text(name: str, text: Any) -> None:
    """Raise unless it is a string that UTF-8 can encode."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a string, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # It was decoded from bytes that are not UTF-8.
        raise ValueError(f"{name} contains an unpaired surrogate, {text[error.start]!a}, at {error.start}") from None


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, bytes)) or not all(isinstance(message, Mapping) for message in messages):
        raise TypeError('messages must be a list of objects such as {"role": "user", "content": "..."}')


def _check_integers(name: str, values: Sequence[Any], bits: int) -> None:
    if not all(isinstance(value, int) and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1) for value in values):
        raise _no_integers(name, bits)


def _no_integers(name: str, bits: int) -> ValueError:
    return ValueError(f"{name}: must be integers within the range of INT{bits}")


def _plain(value: Any) -> Any:
    """Convert numpy scalars and arrays, tuples and sets in a sampling value to JSON types."""
    if type(value) in _SCALARS:
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value
