"""Sampling keys as clients write them -> `SamplingParams`.  No torch, no Triton.

vLLM's names are canonical; TensorRT-LLM's and OpenAI's are aliases.  Values may be JSON values,
strings ("temperature": "0", which vllm_backend accepts too) or elements of typed tensors.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.errors import RequestError, shown
from inflight.frontend.request.limits import Limits
from inflight.frontend.request.structured_outputs import guided_by, structured_outputs
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.grammars.spec import GrammarSpec

__all__ = [
    "CUMULATIVE",
    "FINAL_ONLY",
    "SAMPLING_KEYS",
    "RequestKeys",
    "request_keys",
]

_LOGIT_BIAS_LIMIT = 100.0  # vLLM clamps there

# Values of `output_kind`, in the order of vLLM's `RequestOutputKind`.
CUMULATIVE, DELTA, FINAL_ONLY = _OUTPUT_KINDS = range(3)


@dataclass(slots=True)
class RequestKeys:
    """What a request's sampling keys say.

    Attributes:
        params: for the engine; `seed` is None if not given, and ranges are not checked.
        truncate_prompt_tokens: keep the last tokens of the prompt, at most so many; None: all of them.
        output_kind: what a streaming response contains; None: what is new.
    """

    params: SamplingParams
    truncate_prompt_tokens: int | None = None
    output_kind: int | None = None


def to_int(value: Any) -> int:
    """An integer from 5, 5.0 or "5"."""
    if isinstance(value, str):
        value = float(value) if "." in value or "e" in value.lower() else int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise ValueError
    return int(value)


def to_count(value: Any) -> int | None:
    """An integer; true is 1, as vllm_backend has it, and false is none: Triton's OpenAI frontend sends it."""
    return (1 if value else None) if isinstance(value, bool) else to_int(value)


def to_float(value: Any) -> float:
    """A finite number from 1, 0.5 or "0.5"."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def to_bool(value: Any) -> bool:
    """True or false from a boolean, 0, 1 or one of these as a string."""
    known = {"true": True, "false": False, "1": True, "0": False}
    try:
        return known[str(value).strip().lower()]
    except KeyError:
        raise ValueError from None


def to_text(value: Any) -> str:
    """A string that UTF-8 can encode."""
    if not isinstance(value, str):
        raise ValueError
    value.encode("utf-8")  # JSON can contain unpaired surrogates: UnicodeEncodeError, which is a ValueError
    return value


def to_texts(value: Any) -> list[str]:
    """Strings without the empty ones; a single string counts as a list of one."""
    texts = [to_text(entry) for entry in ([value] if isinstance(value, str) else value)]
    return list(dict.fromkeys(filter(None, texts)))


def to_ids(value: Any) -> list[int]:
    """Distinct token ids from a list, or from a string that is a JSON list."""
    if isinstance(value, str):
        value = json.loads(value)
    return list(dict.fromkeys(to_int(entry) for entry in (value if isinstance(value, list) else [value])))


def to_output_kind(value: Any) -> int:
    """A number of `_OUTPUT_KINDS`."""
    kind = to_int(value)
    if kind not in _OUTPUT_KINDS:
        raise ValueError
    return kind


def to_logit_bias(value: Any) -> dict[int, float]:
    """Token id -> bias, clamped to [-100, 100], from an object, or from a string that is a JSON object."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ValueError
    limit = _LOGIT_BIAS_LIMIT
    return {to_int(key): max(-limit, min(limit, to_float(bias))) for key, bias in value.items()}


_TEXTS, _IDS = (to_texts, "a string or a list of strings"), (to_ids, "a list of token ids")
_INT, _FLOAT, _BOOL = (to_int, "an integer"), (to_float, "a finite number"), (to_bool, "true or false")
_TEXT = (to_text, "a string")
_STRUCTURED = (lambda value: value, "an object")  # read by `structured_outputs.py`, whose errors are closer

# Canonical key -> (conversion, what the value must be).
SAMPLING_KEYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "n": _INT,
    "temperature": _FLOAT,
    "top_k": _INT,
    "top_p": _FLOAT,
    "min_p": _FLOAT,
    "repetition_penalty": _FLOAT,
    "presence_penalty": _FLOAT,
    "frequency_penalty": _FLOAT,
    "logit_bias": (to_logit_bias, "an object that maps token ids to numbers"),
    "bad_words": _TEXTS,
    "stop": _TEXTS,
    "stop_token_ids": _IDS,
    "allowed_token_ids": _IDS,
    "end_id": _INT,
    "include_stop_str_in_output": _BOOL,
    "ignore_eos": _BOOL,
    "max_tokens": _INT,
    "min_tokens": _INT,
    "logprobs": (to_count, "an integer"),
    "prompt_logprobs": (to_count, "an integer"),
    "seed": _INT,
    "skip_special_tokens": _BOOL,
    "detokenize": _BOOL,
    "truncate_prompt_tokens": _INT,
    "structured_outputs": _STRUCTURED,
    "guided_decoding": _STRUCTURED,
    "guided_decoding_guide_type": _TEXT,
    "guided_decoding_guide": _TEXT,
    "output_kind": (to_output_kind, "0 (cumulative), 1 (delta) or 2 (final only)"),
    "flat_logprobs": _BOOL,
}

# A key wins over its alias if both are given, except that `max_completion_tokens` wins over
# `max_tokens`: LiteLLM adds a default `max_tokens` to requests that give only the former.  Stop
# strings are joined.
_ALIASES = {
    "stop_words": "stop",
    "random_seed": "seed",
    "min_length": "min_tokens",
    "max_completion_tokens": "max_tokens",
    "num_return_sequences": "n",
}

# Keys of features that do not exist here, and the values that ask for nothing: only these are accepted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False, 0),
    "length_penalty": (1.0, 0.0),
    "len_penalty": (1.0, 0.0),
    "spaces_between_special_tokens": (True,),
    "skip_clone": (False, True),
    "skip_reading_prefix_cache": (False,),
    "return_perf_metrics": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
}
_UNSERVED = {
    "lora_name": "LoRA feature is not enabled.",  # vllm_backend's words
}
_IGNORED = {"pad_id"}  # TensorRT-LLM's padding token: nothing is padded here


def request_keys(
    layers: list[Mapping[str, Any]],
    tokenizer: Tokenizer,
    limits: Limits,
    default_max_tokens: int,
    is_tensorrt_llm: bool = False,
) -> RequestKeys:
    """Merge and convert a request's sampling keys.

    Ranges are checked by `SamplingParams.validate`.

    Args:
        layers: key -> value as received; later layers win.
        is_tensorrt_llm: take TensorRT-LLM's defaults.

    Raises:
        RequestError: INVALID_ARG; an unknown key, or a value of the wrong type.
        LimitError: a list that is too long.
    """
    values: dict[str, Any] = {"max_tokens": default_max_tokens}
    for layer in layers:
        values |= _canonical(layer)
    limits.check_lists(values)
    values.pop("flat_logprobs", None)  # how vLLM keeps them in memory; vllm_backend's JSON is the same
    if (bad_words := values.pop("bad_words", None)) is not None:
        values["bad_words_ids"] = tokenizer.bad_words_ids(bad_words)
    if (end_id := values.pop("end_id", None)) is not None:
        # TensorRT-LLM: a negative id turns the end-of-sequence token off.
        if end_id < 0:
            values["ignore_eos"] = True
        else:
            values["stop_token_ids"] = [*values.get("stop_token_ids", []), end_id]
    if (grammar := _grammar(values)) is not None:
        values["grammar"] = grammar
    if values.get("seed") == -1:  # vLLM: -1 means no seed
        del values["seed"]
    if is_tensorrt_llm:
        _apply_greedy_default(values)
    truncate, output_kind = values.pop("truncate_prompt_tokens", None), values.pop("output_kind", None)
    return RequestKeys(SamplingParams(**values), truncate, output_kind)


def _grammar(values: dict[str, Any]) -> GrammarSpec | None:
    """Take the keys that constrain the output out of `values`."""
    found = {
        key: structured_outputs(key, value)
        for key in ("structured_outputs", "guided_decoding")
        if (value := values.pop(key, None)) is not None
    }
    guide_type, guide = values.pop("guided_decoding_guide_type", None), values.pop("guided_decoding_guide", None)
    if guide_type is not None or guide is not None:
        found["guided_decoding_guide_type"] = guided_by(guide_type, guide)
    given = {key: spec for key, spec in found.items() if spec is not None}
    if len(given) > 1:
        raise RequestError("INVALID_ARG", f"{' and '.join(given)} both constrain the output: give one of them")
    return next(iter(given.values()), None)


def _apply_greedy_default(values: dict[str, Any]) -> None:
    """TensorRT-LLM is greedy unless `top_k` or `top_p` is given; 0, the default of both, is not to give it."""
    if values.get("top_p") == 0:
        del values["top_p"]
    if not values.get("top_k") and "top_p" not in values:
        values["temperature"] = 0.0


def _canonical(layer: Mapping[str, Any]) -> dict[str, Any]:
    """One layer with canonical keys and converted values."""
    found: dict[str, Any] = {}
    for key in sorted(layer, key=_strength):
        value, name = layer[key], _ALIASES.get(key, key)
        if value is None or key in _IGNORED:
            continue
        if key in _NEUTRAL:
            _check_neutral(key, value)
        elif key in _UNSERVED:
            raise RequestError("INVALID_ARG", _UNSERVED[key])
        elif name not in SAMPLING_KEYS:
            raise RequestError("INVALID_ARG", f"unknown sampling parameter {shown(key)}; {_nearest(key)}")
        else:
            converted = _convert(key, name, value)
            if converted is None:
                continue
            if name == "stop":
                converted = list(dict.fromkeys([*found.get(name, []), *converted]))
            found[name] = converted
    return found


def _strength(key: str) -> int:
    """Keys of one layer apply in this order, and a later one replaces an earlier one."""
    return 2 if key == "max_completion_tokens" else 0 if key in _ALIASES else 1


def _convert(key: str, name: str, value: Any) -> Any:
    convert, allowed = SAMPLING_KEYS[name]
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise RequestError("INVALID_ARG", f"{key}={shown(value)}: must be {allowed}") from None


def _check_neutral(key: str, value: Any) -> None:
    allowed = _NEUTRAL[key]
    try:
        given = to_bool(value) if isinstance(allowed[0], bool) else to_float(value)
    except (ValueError, TypeError, OverflowError):
        given = value
    if given not in allowed:
        raise RequestError("INVALID_ARG", f"{key}={shown(value)} is not supported: omit it or set it to {allowed[0]}")


def _nearest(key: str) -> str:
    known = [*SAMPLING_KEYS, *_ALIASES]
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
