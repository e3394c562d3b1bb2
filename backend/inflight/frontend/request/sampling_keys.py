"""Sampling keys as clients write them -> `SamplingParams`.  No torch, no Triton.

`SAMPLING_KEYS` is the one table of their names: the wire contract takes its typed inputs from it, and a test compares
the client's and the gateway's options with it.  vLLM's names are canonical; TensorRT-LLM's and OpenAI's are aliases.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.errors import RequestError, shown
from inflight.frontend.request.limits import Limits
from inflight.frontend.request.structured_outputs import guided_by, structured_outputs
from inflight.frontend.request.values import (
    to_bool,
    to_count,
    to_float,
    to_ids,
    to_int,
    to_logit_bias,
    to_text,
    to_texts,
)
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.grammars.spec import GrammarSpec

__all__ = [
    "CUMULATIVE",
    "FINAL_ONLY",
    "SAMPLING_KEYS",
    "RequestKeys",
    "SamplingKey",
    "ValueKind",
    "request_keys",
]

_MAX_COMPARED = 100  # characters of an unknown key

# Values of `output_kind`, in the order of vLLM's `RequestOutputKind`.
CUMULATIVE, DELTA, FINAL_ONLY = _OUTPUT_KINDS = range(3)


@dataclass(slots=True)
class RequestKeys:
    """The sampling keys of a request, converted.

    Attributes:
        params: for the engine; `seed` is None if not given, and ranges are not checked.
        truncate_prompt_tokens: keep at most this many tokens, the last ones of the prompt; None: all of them.
        output_kind: content of a streaming response (`CUMULATIVE` ...); None: the new output.
        lora_name, lora_task_id: name and number of the adapter; None: not given.
    """

    params: SamplingParams
    truncate_prompt_tokens: int | None = None
    output_kind: int | None = None
    lora_name: str | None = None
    lora_task_id: int | None = None


class ValueKind(NamedTuple):
    """The allowed values of a key.

    Attributes:
        convert: from the client's form; raises ValueError, TypeError or OverflowError.
        allowed: what the value must be, for errors.
        data_type, dims: of a typed input tensor.
    """

    convert: Callable[[Any], Any]
    allowed: str
    data_type: str = ""
    dims: tuple[int, ...] = (1,)


class SamplingKey(NamedTuple):
    """A name that clients can write.

    Attributes:
        typed: it can come as an input tensor, too.
        alias_of: the canonical key; None if this is one, or has no effect.
        accepts: of a feature that does not exist here, the values that ask for nothing: only these are accepted.
        ignored: any value is accepted and has no effect.
        refusal: the error of any value.
    """

    kind: ValueKind
    typed: bool = False
    alias_of: str | None = None
    accepts: tuple[Any, ...] = ()
    ignored: bool = False
    refusal: str = ""

    @property
    def has_effect(self) -> bool:
        return not (self.accepts or self.ignored or self.refusal)


def _to_output_kind(value: Any) -> int:
    kind = to_int(value)
    if kind not in _OUTPUT_KINDS:
        raise ValueError
    return kind


_INT = ValueKind(to_int, "an integer", "TYPE_INT32")
_SEED, _UINT64 = _INT._replace(data_type="TYPE_INT64"), _INT._replace(data_type="TYPE_UINT64")
_COUNT = ValueKind(to_count, "an integer")
_FLOAT = ValueKind(to_float, "a finite number", "TYPE_FP32")
_BOOL = ValueKind(to_bool, "true or false", "TYPE_BOOL")
_TEXT = ValueKind(to_text, "a string", "TYPE_STRING")
_TEXTS = ValueKind(to_texts, "a string or a list of strings", "TYPE_STRING", (-1,))
_IDS = ValueKind(to_ids, "a list of token ids", "TYPE_INT64", (-1,))
_BIAS = ValueKind(to_logit_bias, "an object that maps token ids to numbers")
_OUTPUT_KIND = ValueKind(_to_output_kind, "0 (cumulative), 1 (delta) or 2 (final only)")
_WEIGHTS = ValueKind(lambda value: value, "", "TYPE_FP16", (-1, -1))
_WEIGHTS_CONFIG = ValueKind(lambda value: value, "", "TYPE_INT32", (-1, 3))
_STRUCTURED = ValueKind(lambda value: value, "an object")  # `structured_outputs.py` reads it; its errors say more

_BY_NAME = (
    "a request cannot bring an adapter; let the operator load it (docs/lora.md), and send lora_name or lora_task_id"
)

# A key wins over its alias if both are given, except that `max_completion_tokens` wins over
# `max_tokens`: LiteLLM adds a default `max_tokens` to requests that give only the former.  Stop
# strings are joined.
SAMPLING_KEYS: dict[str, SamplingKey] = {
    "max_tokens": SamplingKey(_INT, typed=True),
    "max_completion_tokens": SamplingKey(_INT, typed=True, alias_of="max_tokens"),
    "min_tokens": SamplingKey(_INT, typed=True),
    "min_length": SamplingKey(_INT, typed=True, alias_of="min_tokens"),
    "n": SamplingKey(_INT, typed=True),
    "top_k": SamplingKey(_INT, typed=True),
    "temperature": SamplingKey(_FLOAT, typed=True),
    "top_p": SamplingKey(_FLOAT, typed=True),
    "min_p": SamplingKey(_FLOAT, typed=True),
    "repetition_penalty": SamplingKey(_FLOAT, typed=True),
    "presence_penalty": SamplingKey(_FLOAT, typed=True),
    "frequency_penalty": SamplingKey(_FLOAT, typed=True),
    "random_seed": SamplingKey(_UINT64, typed=True, alias_of="seed"),
    "seed": SamplingKey(_SEED, typed=True),
    "stop": SamplingKey(_TEXTS, typed=True),
    "stop_words": SamplingKey(_TEXTS, typed=True, alias_of="stop"),
    "bad_words": SamplingKey(_TEXTS, typed=True),
    "stop_token_ids": SamplingKey(_IDS, typed=True),
    "ignore_eos": SamplingKey(_BOOL, typed=True),
    "include_stop_str_in_output": SamplingKey(_BOOL, typed=True),
    "skip_special_tokens": SamplingKey(_BOOL, typed=True),
    "guided_decoding_guide_type": SamplingKey(_TEXT, typed=True),
    "guided_decoding_guide": SamplingKey(_TEXT, typed=True),
    "end_id": SamplingKey(_INT, typed=True),
    "pad_id": SamplingKey(_INT, typed=True, ignored=True),  # TensorRT-LLM's padding token: nothing is padded here
    "beam_width": SamplingKey(_INT, typed=True, accepts=(1,)),
    "num_return_sequences": SamplingKey(_INT, typed=True, alias_of="n"),
    "length_penalty": SamplingKey(_FLOAT, typed=True, accepts=(1.0, 0.0)),
    "return_context_logits": SamplingKey(_BOOL, typed=True, accepts=(False,)),
    "return_generation_logits": SamplingKey(_BOOL, typed=True, accepts=(False,)),
    "lora_name": SamplingKey(_TEXT, typed=True),
    "lora_task_id": SamplingKey(_UINT64, typed=True),
    "lora_id": SamplingKey(_UINT64, typed=True, alias_of="lora_task_id"),
    "lora_weights": SamplingKey(_WEIGHTS, typed=True, refusal=f"lora_weights: {_BY_NAME}"),
    "lora_config": SamplingKey(_WEIGHTS_CONFIG, typed=True, refusal=f"lora_config: {_BY_NAME}"),
    "lora_path": SamplingKey(_TEXT, refusal=f"lora_path: {_BY_NAME}"),
    "logit_bias": SamplingKey(_BIAS),
    "allowed_token_ids": SamplingKey(_IDS),
    "logprobs": SamplingKey(_COUNT),
    "prompt_logprobs": SamplingKey(_COUNT),
    "detokenize": SamplingKey(_BOOL),
    "truncate_prompt_tokens": SamplingKey(_INT),
    "structured_outputs": SamplingKey(_STRUCTURED),
    "guided_decoding": SamplingKey(_STRUCTURED),
    "output_kind": SamplingKey(_OUTPUT_KIND),
    "flat_logprobs": SamplingKey(_BOOL),
    "best_of": SamplingKey(_INT, accepts=(1,)),
    "use_beam_search": SamplingKey(_BOOL, accepts=(False,)),
    "early_stopping": SamplingKey(_BOOL, accepts=(False, 0)),
    "len_penalty": SamplingKey(_FLOAT, accepts=(1.0, 0.0)),
    "spaces_between_special_tokens": SamplingKey(_BOOL, accepts=(True,)),
    "skip_clone": SamplingKey(_BOOL, accepts=(False, True)),
    "skip_reading_prefix_cache": SamplingKey(_BOOL, accepts=(False,)),
    "return_perf_metrics": SamplingKey(_BOOL, accepts=(False,)),
}


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
        is_tensorrt_llm: use TensorRT-LLM's defaults.

    Raises:
        RequestError: INVALID_ARG; an unknown key, or a value of the wrong type.
        LimitError: a list that is too long.
    """
    values: dict[str, Any] = {"max_tokens": default_max_tokens}
    for layer in layers:
        values |= _canonical(layer)
    limits.check_lists(values)
    values.pop("flat_logprobs", None)  # a layout in vLLM's memory; vllm_backend's JSON is the same
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
    beside = [values.pop(key, None) for key in ("truncate_prompt_tokens", "output_kind", "lora_name", "lora_task_id")]
    return RequestKeys(SamplingParams(**values), *beside)


def _grammar(values: dict[str, Any]) -> GrammarSpec | None:
    """Remove the keys that constrain the output from `values`, and convert them."""
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
    """TensorRT-LLM is greedy unless `top_k` or `top_p` is given; 0, the default of both, counts as not given."""
    if values.get("top_p") == 0:
        del values["top_p"]
    if not values.get("top_k") and "top_p" not in values:
        values["temperature"] = 0.0


def _canonical(layer: Mapping[str, Any]) -> dict[str, Any]:
    """One layer with canonical keys and converted values."""
    found: dict[str, Any] = {}
    for key in sorted(layer, key=_strength):
        value, row = layer[key], SAMPLING_KEYS.get(key)
        if row is None:
            if value is not None:
                raise RequestError("INVALID_ARG", f"unknown sampling parameter {shown(key)}; {_nearest(key)}")
            continue
        if value is None or row.ignored:
            continue
        if row.refusal:
            raise RequestError("INVALID_ARG", row.refusal)
        if row.accepts:
            _check_accepted(key, value, row.accepts)
            continue
        converted = _convert(key, row.kind, value)
        if converted is None:
            continue
        name = row.alias_of or key
        if name == "stop":
            converted = list(dict.fromkeys([*found.get(name, []), *converted]))
        found[name] = converted
    return found


def _strength(key: str) -> int:
    """Keys of one layer apply in this order, and a later one replaces an earlier one."""
    row = SAMPLING_KEYS.get(key)
    return 2 if key == "max_completion_tokens" else 0 if row is not None and row.alias_of else 1


def _convert(key: str, kind: ValueKind, value: Any) -> Any:
    try:
        return kind.convert(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise RequestError("INVALID_ARG", f"{key}={shown(value)}: must be {kind.allowed}") from None


def _check_accepted(key: str, value: Any, accepts: tuple[Any, ...]) -> None:
    try:
        given = to_bool(value) if isinstance(accepts[0], bool) else to_float(value)
    except (ValueError, TypeError, OverflowError):
        given = value
    if given not in accepts:
        raise RequestError("INVALID_ARG", f"{key}={shown(value)} is not supported: omit it or set it to {accepts[0]}")


def _nearest(key: str) -> str:
    known = [name for name, row in SAMPLING_KEYS.items() if row.has_effect]
    near = difflib.get_close_matches(key[:_MAX_COMPARED], known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
