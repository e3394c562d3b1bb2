"""Engine configuration: what `model.json` may say.

Names and defaults follow vLLM's engine arguments where vLLM has the option, so that a
`vllm_backend` repository entry needs few edits.  This module imports no torch: the
frontend, the command line and the engine process all read it.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

__all__ = ["ConfigError", "EngineConfig", "PriorityClass", "TenantOptions", "parse_bytes"]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, the value and the fix."""


_MOST = 2**31 - 1  # of counts: what the engine's int32 arrays and the wire hold
_PositiveInt = Annotated[int, Meta(ge=1, le=_MOST)]
_Seconds = Annotated[float, Meta(gt=0, le=1e6)]
_Share = Annotated[float, Meta(gt=0, le=1)]

_TRACED_STEPS = 4096  # of "step_trace": true

_BYTE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_bytes(value: int | str) -> int:
    """Bytes from an integer or a text such as `"512MiB"`, `"4 GiB"` or `"2G"`.

    Raises:
        ConfigError: when the text is not a number with one of the units K, M, G, Ki, Mi, Gi.
    """
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]I?)?B?\s*", value.upper())
    if match is None:
        raise ConfigError(f'cannot read {value!r} as a size: give bytes or a text like "4GiB"')
    return int(float(match[1]) * _BYTE_UNITS[match[2] or ""])


def _bytes_of(name: str, value: int | str) -> int:
    """`parse_bytes`, with the key's name in its error."""
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _refuse_half_characters(key: str, value: Any, source: str) -> None:
    """JSON can spell lone surrogates ("\\ud800"), which no file name, message or template can hold."""
    try:
        json.dumps([key, value], ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"{source}: {key!a} holds half a character (a lone surrogate such as \\ud800); write it whole"
        ) from None


def _choices(hint: Any, error: str) -> tuple[Any, ...]:
    """What the error's value could have been: the values of a `Literal`, the keys of a nested object."""
    if "enum" in error:
        return get_args(hint)
    return get_args(hint)[1].__struct_fields__ if "unknown field" in error else ()


class TenantOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one tenant gets.

    Attributes:
        weight: its share of the tokens, against the weights of the others that have work waiting.
        max_running: most of its sequences in one step; `None` for no cap.
        max_queued: most of its sequences waiting; one more is refused with UNAVAILABLE. `None` for no cap.
    """

    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    max_running: _PositiveInt | None = None
    max_queued: _PositiveInt | None = None


class PriorityClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for one class of `request_priority`.

    Attributes:
        max_queue_size: most waiting sequences of the class; one more is refused with UNAVAILABLE.
    """

    max_queue_size: _PositiveInt


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the engine process is told at start.  Frozen; unknown keys are errors.

    Attributes:
        model: directory of a Hugging Face checkpoint, or a hub id.
        tokenizer: directory or hub id of the tokenizer; `None` means `model`.
        revision: hub revision of the checkpoint.
        trust_remote_code: let the checkpoint run its own Python code while loading.
        dtype: dtype of weights, activations and KV pool; "auto" takes the checkpoint's: bfloat16 for most. One in
            float32 stays so; "bfloat16" halves its time where the CPU has instructions for it.
        device: "cuda", "cpu", or "auto" for CUDA where there is one.
        max_model_len: most tokens (prompt plus output) of one request; `None` takes the
            checkpoint's `max_position_embeddings`.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: token budget of one step, prefill and decode together.
        itl_target_ms: milliseconds between two tokens of a running request: prompts get what keeps the steps
            within it, by a cost model fitted while serving. `None` gives them all of the step's budget. With
            a target a CPU's KV pool takes its memory at load.
        max_num_partial_prefills: prompts that may be partly computed at once.
        max_long_partial_prefills: those of them that may be long, so that short ones pass.
        long_prefill_token_threshold: a prompt is long that has more tokens to compute, and a step computes no
            more of it than this. 0: nothing is long, or with `max_num_partial_prefills` above 1 what needs more
            than max_num_batched_tokens / max_num_partial_prefills.
        async_scheduling: make step n + 1 while step n runs. Outputs are the same; a request that stops at a
            token computes one row in vain, and a request that arrives waits for one step more.
        block_size: tokens in one KV block.
        gpu_memory_utilization: share of the GPU's memory for weights, activations and KV pool.
        kv_cache_memory: bytes (or "4GiB") of the KV pool; on a CPU `None` takes a share of the
            free RAM, on a GPU it takes what `gpu_memory_utilization` leaves.
        kv_cache_dtype: what the KV pool stores: "auto" is the model's dtype, "int8" halves bfloat16's bytes
            and doubles the tokens that a pool holds, "fp8" (e4m3) does so on GPUs of compute capability 8.9
            and up.  A kernel that lacks it is refused at load.
        num_gpu_blocks_override: exact number of KV blocks, for tests and benchmarks.
        watermark: share of the KV blocks that admission leaves free for the requests that run, so that one more
            does not preempt at once. It never keeps out a request that would run alone.
        admission: "predicted_peak" admits while the most blocks that the running requests will ever need, judged
            by the outputs of those that ended lately, fit the pool; "free_blocks" looks at what is free now.
        preemption_victim: who gives up its blocks when they run out: "last" whom `scheduling_policy` ranks last
            (under "fcfs" the latest admitted, under "priority" the least urgent class and the latest arrival in it),
            "lowest_priority" that by class and arrival alone, "longest" who has most tokens, "least_preempted"
            who was preempted least.
        swap_space: host memory for KV blocks of preempted requests, in GiB (4 or 0.5) or as a size ("512MiB");
            0 has none, and they are computed again.
        preemption_mode: with `swap_space`, "auto" swaps or recomputes each victim, by what is cheaper as measured;
            "swap" and "recompute" always do that.
        enable_prefix_caching: reuse the KV blocks of equal prompt prefixes, within a tenant and a `cache_salt`:
            nobody can tell by a first token's time what another tenant asked.
        attention_backend: "auto", or the name of a kernel (see `attention/`).
        max_queue_size: most waiting sequences; one more is refused with UNAVAILABLE. 0 lifts it.
        scheduling_policy: who is next of those that wait: "fcfs" (first come), "priority" (smaller
            `request_priority` first, and running requests of a larger one give way), "sjf" (smaller `max_tokens`
            first) or "edf" (earlier deadline first, from the request's timeout).
        priority_aging_seconds: waiting that outweighs one class of `request_priority` under "priority".
        sjf_aging_seconds: waiting that outweighs one token of `max_tokens` under "sjf".
        edf_default_timeout: seconds until the deadline that "edf" assumes of a request without a timeout.
        priority_classes: queue limits of single classes, beside `max_queue_size`: {"2": {"max_queue_size": 64}}.
        tenants: weight and caps by tenant, "*" for those not named; turns on fair queueing across tenants:
            {"gold": {"weight": 4, "max_running": 32, "max_queued": 100}, "*": {}}.
        stream_interval: new tokens that a streaming response waits for, after a request's first one. A response
            costs server, backend and client about 0.5 ms of CPU together: on few cores with a small model 4 or 8
            leave more to the engine.
        default_max_tokens: `max_tokens` of a request that names none.
        seed: base of the seeds given to requests that name none; `None` draws it from the OS.
        cpu_threads: intra-op threads of torch in the engine process; `None` takes all cores.
        chat_template: Jinja text that replaces the checkpoint's chat template.
        enforce_eager: never capture CUDA graphs (accepted for compatibility on a CPU).
        disable_log_stats: publish no custom metrics.
        disable_log_requests: accepted for compatibility; requests are never logged.
        tensor_parallel_size: ranks of the engine; only 1 is built.
        python_executable: interpreter of the engine process; `None` takes the stub's own.
        step_trace: keep what the last steps did, for `inflight trace`; `true` keeps 4096 steps, a number
            as many. See docs/tracing.md.
        check_on_load: compare a small batch with transformers' own attention before serving.
        native_forward: on a CPU, run decoders of the llama family as one native call and the linear layers of
            others by the native kernel, on weights packed at load; on a GPU, run norms, rotary embedding and
            gates of the modules that are recognised by kernels of ours, on merged projections.
        quantization: "int8" holds the weights of linear layers in eight bits, a scale for every output, and
            quantizes their inputs row by row: faster on a CPU, and half the memory of bfloat16. `None`: as loaded.
        engine_start_timeout: seconds the engine process has to load the checkpoint.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: Annotated[int, Meta(ge=2, le=_MOST)] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 256
    max_num_batched_tokens: _PositiveInt = 2048
    itl_target_ms: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    max_num_partial_prefills: _PositiveInt = 1
    max_long_partial_prefills: _PositiveInt = 1
    long_prefill_token_threshold: Annotated[int, Meta(ge=0, le=_MOST)] = 0
    async_scheduling: bool = False
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    gpu_memory_utilization: _Share = 0.9
    kv_cache_memory: Annotated[int, Meta(le=2**62)] | str | None = None
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    num_gpu_blocks_override: _PositiveInt | None = None
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    admission: Literal["predicted_peak", "free_blocks"] = "predicted_peak"
    preemption_victim: Literal["last", "lowest_priority", "longest", "least_preempted"] = "last"
    swap_space: Annotated[float, Meta(ge=0, le=2**20)] | str = 0
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    max_queue_size: Annotated[int, Meta(ge=0, le=_MOST)] = 1024
    scheduling_policy: Literal["fcfs", "priority", "sjf", "edf"] = "fcfs"
    priority_aging_seconds: _Seconds = 300.0
    sjf_aging_seconds: _Seconds = 0.1
    edf_default_timeout: _Seconds = 60.0
    priority_classes: dict[Annotated[int, Meta(ge=-_MOST - 1, le=_MOST)], PriorityClass] = {}
    tenants: dict[str, TenantOptions] = {}
    stream_interval: _PositiveInt = 1
    default_max_tokens: _PositiveInt = 16
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cpu_threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    chat_template: str | None = None
    enforce_eager: bool = False
    disable_log_stats: bool = False
    disable_log_requests: bool = True
    tensor_parallel_size: _PositiveInt = 1
    python_executable: str | None = None
    step_trace: bool | Annotated[int, Meta(ge=1, le=1_000_000)] = False
    check_on_load: bool = True
    native_forward: bool = True
    quantization: Literal["int8"] | None = None
    engine_start_timeout: _Seconds = 600.0

    def __post_init__(self) -> None:
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size}: this engine runs on one device; set it to 1"
            )
        if self.kv_cache_memory is not None and _bytes_of("kv_cache_memory", self.kv_cache_memory) <= 0:
            raise ConfigError(f"kv_cache_memory={self.kv_cache_memory!r}: it must be more than 0 bytes")
        if not self.swap_bytes and self.preemption_mode == "swap":
            raise ConfigError('preemption_mode="swap" needs host memory for the blocks: set swap_space, to 4 (GiB) say')
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ConfigError(
                f"max_long_partial_prefills={self.max_long_partial_prefills} is more than "
                f"max_num_partial_prefills={self.max_num_partial_prefills}: long prompts are some of them; lower it"
            )
        if self.max_model_len is not None and self.long_prefill_token_threshold > self.max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} is more than "
                f"max_model_len={self.max_model_len}: no prompt is that long; lower it, or set 0 to turn it off"
            )

    @property
    def swap_bytes(self) -> int:
        """Bytes of host memory for swapped KV blocks."""
        if isinstance(self.swap_space, str):
            return _bytes_of("swap_space", self.swap_space)
        return int(self.swap_space * 2**30)

    @property
    def num_traced_steps(self) -> int:
        """Steps that the step trace keeps; 0 when it is off."""
        return _TRACED_STEPS if self.step_trace is True else int(self.step_trace)

    @property
    def tokenizer_source(self) -> str:
        """Where the tokenizer is loaded from."""
        return self.tokenizer or self.model

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "model.json") -> EngineConfig:
        """Build from decoded JSON.

        Raises:
            ConfigError: unknown key (with the nearest known one), wrong type or range.
        """
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: expected a JSON object, got {type(values).__name__}")
        known = cls.__struct_fields__
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
                raise ConfigError(f"{source}: unknown key {key!r}; {hint}")
            _refuse_half_characters(key, values[key], source)
        if "model" not in values:
            raise ConfigError(f'{source}: "model" is missing; name a checkpoint directory or a hub id')
        try:
            return msgspec.convert(values, cls, str_keys=True)
        except msgspec.ValidationError as error:
            at = re.search(r"\$\.(\w+)", str(error))
            came = f"{at[1]}={values.get(at[1])!r}: " if at else ""
            choices = _choices(get_type_hints(cls)[at[1]], str(error)) if at else ()
            allowed = f"; allowed are {', '.join(map(repr, choices))}" if choices else ""
            raise ConfigError(f"{source}: {came}{str(error).split(' - at ')[0]}{allowed}") from None

    @classmethod
    def from_file(cls, path: str | Path) -> EngineConfig:
        """Read a `model.json`.  A relative `model` or `tokenizer` that exists beside the file
        is taken from there, so that a repository entry can carry its checkpoint.

        Raises:
            ConfigError: no such file, not JSON, or what `from_dict` refuses.
        """
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f'{path}: no such file; write {{"model": "<directory or hub id>"}} there') from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or a number of thousands of digits
            raise ConfigError(f"{path}: not valid JSON: {error}") from None
        config = cls.from_dict(values, source=str(path))
        beside = {
            key: str((path.parent / value).resolve())
            for key in ("model", "tokenizer")
            if (value := getattr(config, key)) and (path.parent / value).is_dir()
        }
        return msgspec.structs.replace(config, **beside)
