"""`SamplingParams` of the Python interface: checked when it is made, with the names that vLLM's has.  No torch."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Union

import msgspec

from inflight.engine.sampling_params import SamplingParams as EngineParams
from inflight.frontend.errors import RequestError, shown
from inflight.frontend.request.structured_outputs import structured_outputs
from inflight.frontend.request.values import to_logit_bias
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.grammars.spec import GrammarSpec
from inflight.in_process.outputs import RequestOutputKind

__all__ = ["SamplingParams", "engine_params"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """How the tokens of a request are chosen and when it ends: vLLM's names, ranges and defaults.

    `inflight.engine.sampling_params` says what each does; these differ:

    Attributes:
        stop: a text, or several.
        bad_words: texts that must not appear in the output.
        max_tokens: most output tokens; None: up to the end of the context.
        logprobs, prompt_logprobs: True is 1.
        seed: None and -1 are a random one.
        structured_outputs: what the output must match: what `inflight.grammar` returns, or its keys in a dict, such as
            `{"regex": r"\\d+"}`, or vLLM's `StructuredOutputsParams`.
        grammar: the same under its older name; give one of the two.
        output_kind: the outputs that `AsyncLLM` yields; `LLM` returns the last ones.
        spaces_between_special_tokens, skip_reading_prefix_cache, extra_args: vLLM's, with their defaults only.

    Raises:
        ValueError: a value has the wrong type or is out of range; the message names it and says what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Union[Mapping[int, float], None] = None
    structured_outputs: Union[GrammarSpec, Mapping[str, Any], None] = None
    grammar: Union[GrammarSpec, None] = None
    allowed_token_ids: Union[Sequence[int], None] = None
    bad_words: Union[str, Sequence[str], None] = []
    bad_words_ids: Union[Sequence[Sequence[int]], None] = []
    stop: Union[str, Sequence[str], None] = []
    stop_token_ids: Union[Sequence[int], None] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: Union[int, None] = 16
    min_tokens: int = 0
    logprobs: Union[int, bool, None] = None
    prompt_logprobs: Union[int, bool, None] = None
    seed: Union[int, None] = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    spaces_between_special_tokens: bool = True
    skip_reading_prefix_cache: Union[bool, None] = None
    extra_args: Union[Mapping[str, Any], None] = None

    def __post_init__(self) -> None:
        for name, (read, allowed) in _FIELDS.items():
            value = getattr(self, name)
            try:
                checked = read(value)
            except (ValueError, TypeError, OverflowError):
                raise ValueError(f"{name}={shown(value)} of type {type(value).__name__}: must be {allowed}") from None
            if checked is not value:
                msgspec.structs.force_setattr(self, name, checked)
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)
        msgspec.structs.force_setattr(self, "structured_outputs", _constraint(self.structured_outputs, self.grammar))
        msgspec.structs.force_setattr(self, "grammar", None)
        EngineParams(**_shared(self)).validate()

    def clone(self) -> SamplingParams:
        """These parameters: they cannot be changed.  `msgspec.structs.replace(params, n=2)` makes other ones."""
        return self


def engine_params(params: SamplingParams, tokenizer: Tokenizer, room: int) -> EngineParams:
    """The parameters that cross to the engine.

    Args:
        room: tokens of the context that the prompt leaves free.

    Raises:
        TokenizerError: there are stop or bad words, and no tokenizer.
    """
    texts = [*(params.stop or ()), *(params.bad_words or ())]
    tokenizer.check_texts(texts)
    fields = _shared(params)
    if params.bad_words:
        fields["bad_words_ids"] = [*fields["bad_words_ids"], *tokenizer.bad_words_ids(params.bad_words)]
    if params.max_tokens is None:
        fields["max_tokens"] = max(1, room, params.min_tokens)
    if params.seed is None:
        fields["seed"] = int.from_bytes(os.urandom(8), "little")
    return EngineParams(**fields)


def _shared(params: SamplingParams) -> dict[str, Any]:
    """The engine's parameters, as far as these parameters alone determine them."""
    fields = {name: getattr(params, name) for name in EngineParams.__struct_fields__}
    if params.max_tokens is None:
        fields["max_tokens"] = max(1, params.min_tokens)
    return {**fields, "grammar": params.structured_outputs}


def _constraint(value: Any, older: Any) -> GrammarSpec | None:
    if value is not None and older is not None:
        raise ValueError("structured_outputs and grammar both constrain the output: give one of them")
    value = older if value is None else value
    if is_dataclass(value) and not isinstance(value, type):
        value = {key: one for key, one in vars(value).items() if not key.startswith("_") and one not in (None, False)}
    if value is None or isinstance(value, GrammarSpec):
        return value
    try:
        return structured_outputs("structured_outputs", value)
    except RequestError as error:
        raise ValueError(error.message) from None


def _integer(value: Any) -> int:
    """An integer of Python or numpy, or a float without a fraction; no boolean."""
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return operator.index(value)


def _count(value: Any) -> int | None:
    return (1 if value else None) if isinstance(value, bool) else _integer(value)


def _number(value: Any) -> float:
    if isinstance(value, (bool, str, bytes)) or not math.isfinite(number := float(value)):
        raise TypeError
    return number


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _output_kind(value: Any) -> RequestOutputKind:
    """Also vLLM's own, and their numbers."""
    return RequestOutputKind(_integer(getattr(value, "value", value)))


def _only(*allowed: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not any(value is one for one in allowed):
            raise ValueError
        return value

    return read


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError
        text.encode("utf-8")
    return list(dict.fromkeys(filter(None, texts)))


def _ids(value: Any) -> list[int]:
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError
    return [_integer(token_id) for token_id in value]


def _words(value: Any) -> list[list[int]]:
    return [_ids(word) for word in value]


def _or(default: Any, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: default() if value is None else read(value)


_INTEGER = _integer, "an integer"
_OPTIONAL = _or(lambda: None, _integer), "an integer or None"
_COUNT = _or(lambda: None, _count), "an integer, True or None"
_NUMBER = _number, "a finite number"
_FLAG = _flag, "True or False"
_TEXTS = _or(list, _texts), "a string, a list of strings or None"
_IDS = _or(list, _ids), "a list of token ids or None"

_FIELDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    **dict.fromkeys(("n", "top_k", "min_tokens"), _INTEGER),
    **dict.fromkeys(("max_tokens", "seed"), _OPTIONAL),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _COUNT),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _NUMBER),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"), _FLAG),
    **dict.fromkeys(("stop", "bad_words"), _TEXTS),
    "output_kind": (_output_kind, "a RequestOutputKind, or 0 (cumulative), 1 (delta) or 2 (final only)"),
    "spaces_between_special_tokens": (_only(True), "True"),
    "skip_reading_prefix_cache": (_only(None, False), "None or False; enable_prefix_caching=False is for all requests"),
    "extra_args": (_only(None), "None: no rule here reads them"),
    "stop_token_ids": _IDS,
    "allowed_token_ids": (_or(lambda: None, _ids), _IDS[1]),
    "bad_words_ids": (_or(list, _words), "a list of lists of token ids or None"),
    "logit_bias": (_or(lambda: None, to_logit_bias), "a dict that maps token ids to numbers, or None"),
}
