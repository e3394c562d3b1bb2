"""vLLM's engine arguments in a `model.json`: its names and spellings, and features that are off.

An entry for vllm_backend can name options that are fixed in this engine.  A value that asks for what the engine
does anyway is dropped; any other value is refused, and the message says what to do instead.  No torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["BACKEND", "OTHER_NAMES", "SPELLINGS", "STREAM_INTERVAL", "option_names", "translated"]

_log = logging.getLogger(__name__)

BACKEND = "vllm"  # the name under which Triton's folder of backends has vllm_backend
# Its clients compare one token a response, unless the entry sets another number.
STREAM_INTERVAL = {"stream_interval": 1}

_OFFLOADING = "kv_offloading_size"  # GiB of host memory for KV blocks: the first of `kv_tiers` here
_RENAMED = {"kv_cache_memory_bytes": "kv_cache_memory", _OFFLOADING: "kv_tiers"}

# vLLM's values of options that both have, and this engine's.
SPELLINGS: dict[str, dict[Any, str]] = {
    "async_scheduling": {None: "auto"},  # vLLM's default
    "enable_lora": {None: "false"},
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto", "bitsandbytes": "auto", "gguf": "auto"},
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq", "inc": "auto-round"},
}

_ONE_DEVICE = "this engine runs on one device"


class _Fixed(NamedTuple):
    """A fixed option: the values that ask for what is done anyway, and the advice for any other value."""

    allowed: tuple[Any, ...]
    otherwise: str


# None means the default of every option, and is allowed.
_FIXED: dict[str, _Fixed] = {
    "convert": _Fixed(("auto", "none", "embed", "classify"), "every checkpoint generates and embeds as it can"),
    "config_format": _Fixed(("auto", "hf"), "checkpoints are in the format of transformers"),
    "cpu_offload_gb": _Fixed((0,), "weights stay on the device; quantize them, or use a larger device"),
    "data_parallel_size": _Fixed((1,), "list several `gpus` in `instance_group` of config.pbtxt"),
    "disable_sliding_window": _Fixed((False,), "lower max_model_len to the window instead"),
    "enable_chunked_prefill": _Fixed(
        (True,), "prompts are always computed in chunks of what max_num_batched_tokens leaves; raise it"
    ),
    "enable_expert_parallel": _Fixed((False,), _ONE_DEVICE),
    "enable_log_requests": _Fixed((False,), "requests are never logged; step_trace records their steps"),
    "enable_lora_bias": _Fixed((False,), "biases of adapters are not served; merge the adapter into the checkpoint"),
    "enable_prompt_embeds": _Fixed((False,), "prompts are text or token ids"),
    "enable_sleep_mode": _Fixed((False,), "unload the model to free its memory"),
    "kv_offloading_backend": _Fixed(("native",), "list what keeps KV in kv_tiers"),
    "num_scheduler_steps": _Fixed((1,), "every step is scheduled"),
    "pipeline_parallel_size": _Fixed((1,), _ONE_DEVICE),
    "runner": _Fixed(("auto", "generate", "pooling"), "one engine generates and embeds"),
    "scheduler_delay_factor": _Fixed((0,), "no step waits for more prompts"),
    "skip_tokenizer_init": _Fixed((False,), "the tokenizer is always loaded"),
    "tensor_parallel_size": _Fixed((1,), _ONE_DEVICE),
    "task": _Fixed(
        ("auto", "generate", "embed", "embedding", "score", "classify"), "one engine generates, embeds and scores"
    ),
    "tokenizer_mode": _Fixed(
        ("auto", "hf"), "the tokenizer is tokenizer.json, or what transformers' AutoTokenizer loads"
    ),
}

# Options of mechanisms that this engine does not have: no value has an effect.
_WITHOUT_EFFECT = {
    "disable_custom_all_reduce",
    "disable_log_requests",  # requests are never logged
    "distributed_executor_backend",
    "fully_sharded_loras",
    "lora_extra_vocab_size",  # adapters with embeddings are refused
    "max_context_len_to_capture",
    "max_parallel_loading_workers",
    "max_seq_len_to_capture",
    "served_model_name",  # clients call the model by the name of its folder, as with vllm_backend
    "use_v2_block_manager",
}

# All names that this engine takes beside its own.
OTHER_NAMES = frozenset({*_RENAMED, *_FIXED, *_WITHOUT_EFFECT})


def option_names() -> dict[str, bool]:
    """vLLM's options that are not this engine's; True: a switch."""
    fixed = {name: isinstance(fixed.allowed[0], bool) for name, fixed in _FIXED.items()}
    without_effect = {name: name.startswith(("disable_", "use_")) for name in _WITHOUT_EFFECT}
    return {**fixed, **without_effect, **dict.fromkeys(_RENAMED, False)}


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same options under this engine's names and in its spelling; a log line names those without effect.

    Options that only vLLM has show an entry for vllm_backend, which gets `STREAM_INTERVAL`.

    Raises:
        ValueError: an option asks for something that the engine does not do, or is given under two names.
    """
    is_vllms = any(key in OTHER_NAMES for key in values)
    found: dict[str, Any] = dict(STREAM_INTERVAL) if is_vllms else {}
    ignored = sorted(_WITHOUT_EFFECT.intersection(values))
    if ignored:
        _log.warning("no effect in this engine: %s", ", ".join(ignored))
    for key, value in values.items():
        name = _RENAMED.get(key, key)
        if name != key and name in values:
            raise ValueError(f"{key!r} and {name!r} are the same option; remove one")
        if key == _OFFLOADING:
            value = _host_tier(value)
        if key in _FIXED:
            _check_fixed(key, value)
        elif key not in _WITHOUT_EFFECT:
            spellings = SPELLINGS.get(name, {})
            found[name] = spellings.get(value, value) if value is None or isinstance(value, str) else value
    return found


def _host_tier(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    try:
        size = int(float(value) * 2**30)
    except (TypeError, ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f"{_OFFLOADING}={value!r}: give GiB of host memory, such as 4")
    return [{"type": "host", "size": size}]


def _check_fixed(key: str, value: Any) -> None:
    allowed, otherwise = _FIXED[key]
    if value is not None and _parsed(value) not in allowed:
        default = json.dumps(allowed[0])
        raise ValueError(f"{key}={value!r} is not supported: {otherwise}; omit it or set it to {default}")


def _parsed(value: Any) -> Any:
    """The number or boolean that a string contains; any other value unchanged."""
    try:
        return json.loads(value.lower()) if isinstance(value, str) else value
    except ValueError:
        return value
