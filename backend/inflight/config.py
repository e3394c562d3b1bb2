"""Engine configuration: the keys of `model.json`.

Names and defaults are those of vLLM's engine arguments where vLLM has the option, so a repository
entry for `vllm_backend` needs few edits.  This module imports no torch: the frontend, the command
line and the engine process all read it.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from inflight.kernel_config import KernelConfig
from inflight.kv_events_config import KVEventsConfig
from inflight.kv_tiers_config import KVTier
from inflight.lora_options import LoraOptions
from inflight.pooler_config import HfOverrides, PoolerConfig
from inflight.speculative import SpeculativeConfig
from inflight.vllm_options import translated

__all__ = ["STORED", "ConfigError", "EngineConfig", "PriorityClass", "TenantOptions", "parse_bytes"]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, the value and the fix."""


_MAX_COUNT = 2**31 - 1  # limit of the engine's int32 arrays and of the wire
_PositiveInt = Annotated[int, Meta(ge=1, le=_MAX_COUNT)]
_Seconds = Annotated[float, Meta(gt=0, le=1e6)]
_Share = Annotated[float, Meta(gt=0, le=1)]

# How checkpoints are stored: `quant_method` in their config.json.
_Stored = Literal["auto-round", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "gguf", "gptq", "mxfp4"]
STORED: tuple[str, ...] = get_args(_Stored)

_TRACED_STEPS = 4096  # for "step_trace": true
_STEP_TOKENS = (2048, 8192)  # on a CPU, on a GPU: vLLM's default, and the one that it takes for large cards

_BYTE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_bytes(value: int | str) -> int:
    """Bytes from an integer or a string such as `"512MiB"`, `"4 GiB"` or `"2G"`.

    Raises:
        ConfigError: the string is not a number with one of the units K, M, G, Ki, Mi, Gi.
    """
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]I?)?B?\s*", value.upper())
    if match is None:
        raise ConfigError(f'cannot read {value!r} as a size: give bytes, or a string such as "4GiB"')
    return int(float(match[1]) * _BYTE_UNITS[match[2] or ""])


def _bytes_of(name: str, value: int | str) -> int:
    """`parse_bytes` with the key's name in its error."""
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _check_encodable(key: str, value: Any, source: str) -> None:
    """JSON can contain unpaired surrogates ("\\ud800"), which UTF-8 and thus a path or message cannot."""
    try:
        json.dumps([key, value], ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"{source}: {key!a} contains an unpaired surrogate (such as \\ud800); write the whole character"
        ) from None


def _choices(hint: Any, error: str) -> tuple[Any, ...]:
    """The allowed values: those of a `Literal`, or the keys of a nested object."""
    kinds = (hint, *get_args(hint))
    structs = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    if structs and "unknown field" in error:
        return structs[0].__struct_fields__
    if "enum" not in error:
        return ()
    if structs:  # of one of its keys
        of_key = get_type_hints(structs[0])[error.rstrip("`").rsplit(".", 1)[1]]
        kinds = (of_key, *get_args(of_key))
    literals = [kind for kind in kinds if get_origin(kind) is Literal]
    others = (True, False) if bool in kinds else ()
    return (*get_args(literals[0]), *others) if literals else ()


class TenantOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Share and limits of one tenant.

    Attributes:
        weight: its share of the tokens, relative to the weights of the other tenants with waiting work.
        max_running: maximum of its sequences in one step; `None`: no limit.
        max_queued: maximum of its waiting sequences; one more is refused with UNAVAILABLE. `None`: no limit.
        per_name: of "*" alone: whether each tenant that is not named has a share and limits of its own. `False`: they
            share one set, and a client gains nothing by making up names. `None`: only with `tenant_header`.
    """

    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    max_running: _PositiveInt | None = None
    max_queued: _PositiveInt | None = None
    per_name: bool | None = None


class PriorityClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one class of `request_priority`.

    Attributes:
        max_queue_size: maximum of waiting sequences in the class; one more is refused with UNAVAILABLE.
    """

    max_queue_size: _PositiveInt


class EngineConfig(LoraOptions, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of the engine.  Frozen; unknown keys are errors.

    Attributes:
        model: directory of a Hugging Face checkpoint, a GGUF file, or a hub id; `org/repo:Q4_K_M` and
            `org/repo/name.gguf` are GGUF files on the hub.
        tokenizer: directory or hub id of the tokenizer; `None` means `model`.
        revision: hub revision of the checkpoint.
        tokenizer_revision: hub revision of the tokenizer; `None` means `revision`.
        download_dir: folder in which the hub's files are cached; `None` takes the hub library's own.
        trust_remote_code: let the checkpoint run its own Python code while loading.
        load_format: "auto" reads the checkpoint's weights; "dummy" makes random ones, always the same, for benchmarks.
        dtype: dtype of weights, activations and KV pool; "auto" takes the checkpoint's, which is bfloat16 for most.
            A float32 checkpoint stays float32; "bfloat16" halves its time on a CPU with bfloat16 instructions.
        device: "cuda", "cpu", or "auto": CUDA if available.
        max_model_len: maximum length of a request in tokens, prompt plus output; `None` takes the
            checkpoint's `max_position_embeddings`.
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: token budget of one step, prefill and decode together. `None`: 8192 on a GPU, 2048 on
            a CPU.
        itl_target_ms: target for the time between two tokens of a running request, in milliseconds. A cost model,
            fitted while serving, limits the prompt tokens of a step to what meets the target. `None`: prompts can
            take the whole budget. With a target, a CPU's KV pool is allocated at load.
        max_num_partial_prefills: maximum number of prompts that are partly computed at the same time.
        max_long_partial_prefills: how many of these can be long, so that short prompts can pass.
        long_prefill_token_threshold: a prompt counts as long if it has more tokens left to compute, and a step
            computes at most this many of it. 0: no prompt counts as long, or, if `max_num_partial_prefills` is
            above 1, one that needs more than max_num_batched_tokens / max_num_partial_prefills.
        async_scheduling: prepare step n + 1 while step n runs. Outputs are the same; a request that stops at a
            token wastes one row, and a new request waits one step longer. "auto": on a GPU, not on a CPU.
        speculative_config: drafts of the next tokens; several are verified in one step, and outputs are the same.
            Keys as vLLM's, see docs/speculation.md. `None`: no drafts, except tokens that a grammar forces.
        pooler_config, hf_overrides: details of embeddings and scores that a checkpoint's files leave open. Keys as
            vLLM's, see docs/pooling.md.
        block_size: tokens per KV block.
        gpu_memory_utilization: share of the GPU's memory for weights, activations and KV pool.
        kv_cache_memory: size of the KV pool in bytes or as a string ("4GiB"). `None` takes a share of the free
            RAM on a CPU, and what `gpu_memory_utilization` leaves on a GPU.
        kv_cache_dtype: storage type of the KV pool: "auto" is the model's dtype; "int8" takes half the bytes of
            bfloat16, so the pool holds twice the tokens; so does "fp8" (e4m3), on GPUs of capability 8.9 and up.
            The scales of "fp8" are the checkpoint's if it has them, else calibrated at load with random tokens.
        num_gpu_blocks_override: exact number of KV blocks, for tests and benchmarks.
        watermark: share of the KV blocks that admission keeps free for the running requests, so that a new one
            does not cause a preemption at once. It never blocks a request that would run alone.
        admission: "predicted_peak" admits a request while the predicted peak of blocks of all running requests
            fits the pool, judged by the output lengths of recently finished requests; "free_blocks" looks at the
            blocks that are free now.
        preemption_victim: which request gives up its blocks when they run out: "last" is the one that
            `scheduling_policy` ranks last (with "fcfs" the latest admitted; with "priority" the latest arrival of
            the least urgent class), "lowest_priority" ranks by class and arrival alone, "longest" is the one with
            the most tokens, "least_preempted" the one preempted least often.
        swap_space: host memory for the KV blocks of preempted requests, in GiB (4 or 0.5) or as a string
            ("512MiB"). 0: none; the blocks are computed again.
        preemption_mode: with `swap_space`, "auto" swaps or recomputes each victim, whichever measures cheaper;
            "swap" and "recompute" always do the same.
        enable_prefix_caching: reuse the KV blocks of equal prompt prefixes, within a tenant and a `cache_salt`, so the
            time to the first token reveals nothing about the requests of another tenant.
        kv_tiers: where KV is kept beyond the pool, the fastest first: [{"type": "host", "size": "4GiB"}, {"type":
            "disk", "path": "/kv", "size": "100GiB"}]. A conversation that returns is then read where that is faster
            than computing it, also by another engine; outputs are the same. See docs/memory.md.
        kv_store_secret_file: file with a secret of at least 16 bytes, the same for all engines that share a tier. KV in
            a tier is then signed, and its names tell nothing about prompts.
        kv_listen: "host:port" at which other engines may read this one's tier of type "host". Needs
            `kv_store_secret_file`, unless the host is 127.0.0.1 or another loopback address.
        kv_events_config: tells routers over ZeroMQ which prefixes are cached, in vLLM's form. See docs/memory.md.
        attention_backend: "auto", or the name of a kernel (see `attention/`). "gpu" is the kernel in the Triton
            language; "triton" is an older spelling of it. "flash3" is the same with FlashAttention-3 for prompts.
        kernel_config: kernels that are off until a card has measured them; keys in docs/gpu.md, "Switches".
        max_queue_size: maximum number of waiting sequences; one more is refused with UNAVAILABLE. 0: no limit.
        scheduling_policy: which waiting request is next: "fcfs" (first come, first served), "priority" (smaller
            `request_priority` first; running requests of a larger one give way), "sjf" (smaller `max_tokens`
            first) or "edf" (earliest deadline first, from the request's timeout).
        priority_aging_seconds: waiting time that outweighs one class of `request_priority` under "priority".
        sjf_aging_seconds: waiting time that outweighs one token of `max_tokens` under "sjf".
        edf_default_timeout: seconds to the deadline that "edf" assumes for a request without a timeout.
        priority_classes: queue limits of single classes, besides `max_queue_size`: {"2": {"max_queue_size": 64}}.
        tenants: weight and limits per tenant, "*" for all others; turns on fair queueing between tenants:
            {"gold": {"weight": 4, "max_running": 32, "max_queued": 100}, "*": {}}.
        tenant_header: name of the header in which the operator's proxy names the tenant, such as "x-tenant-8f21"; the
            input `tenant` can then only repeat it. `None`: the tenant is the one that the client claims.
        stream_interval: new tokens that a streaming response waits for, after the first response of its request. 1:
            every token is sent at once. "auto": so, too, unless sending would take more than a few percent of a CPU
            engine's cores, or, beside an engine on a GPU, more than 0.7 of a core; then the responses of a stream are
            up to 0.1 s or 8 tokens apart (beside a GPU 50 ms or 32 tokens), as the number of streams and the measured
            cost of a response demand. See docs/latency.md.  The default is 1 for an entry of vllm_backend: one with
            `backend: "vllm"`, or with options that only vLLM has.
        default_max_tokens: `max_tokens` of a request that does not set it.
        generation_config: where default sampling parameters come from: "auto" is generation_config.json of the
            checkpoint, "vllm" is vLLM's own, a folder or hub id is the file there. `None`: "auto" for `LLM`, "vllm" for
            requests through Triton, as with vllm_backend.
        max_logprobs: maximum of the keys `logprobs` and `prompt_logprobs` of a request; -1: the whole vocabulary,
            which a request asks for with -1. vLLM's default is 20.
        max_n: maximum of the key `n` of a request.
        max_pooled_inputs: maximum of texts to embed, score or classify in one request.
        max_stop_strings, max_bad_words, max_stop_token_ids: maximum length of the lists `stop`, `bad_words` and
            `stop_token_ids` of a request.
        max_stop_bytes: maximum size of all stop strings of a request together, and of all its bad words.
        max_name_bytes: maximum size of a name that the client chooses: `tenant`, `cache_salt`, the request id.
        max_input_bytes: maximum size of one input tensor or request parameter, and of an instruction in all inputs.
        exclude_input_in_output: whether `text_output` omits the prompt if a request does not decide it. `None`: as
            in vllm_backend, the output includes the prompt only for a `text_input` that is not streamed.
        wire_format: the clients to serve: "vllm" or "tensorrt_llm". The latter's responses have one sequence each, and
            its defaults are greedy. See docs/migrating.md.
        seed: base of the seeds of requests without one; `None` takes it from the OS. Of several instances that share
            an engine, the k-th takes `seed` + k, from k = 0.
        cpu_threads: intra-op threads of torch in the engine process; `None` takes as many as its affinity and the
            container's CPU quota allow, and OMP_NUM_THREADS, where it is set.
        chat_template: Jinja source that replaces the checkpoint's chat template.
        chat_template_timeout: seconds of CPU time that the chat template can take for one request. It can use 1 GiB.
        trust_request_chat_template: requests can bring chat templates of their own: programs in Jinja's sandbox.
        enforce_eager: never capture CUDA graphs: a GPU then launches every kernel of a decode step from Python, which
            for small batches takes longer than running them. A CPU captures none in any case.
        max_cudagraph_capture_size: capture steps with prompts, too, of up to so many tokens; at most 2048. 0: decode
            steps only. See docs/gpu.md for what it costs.
        disable_log_stats: publish no custom metrics.
        python_executable: interpreter of the engine process; `None` takes the stub's.
        step_trace: record the last steps for `inflight trace`: `true` keeps 4096 steps, a number that many. See
            docs/tracing.md.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that takes OTLP over HTTP: each request becomes a span.
            Takes the extra `otel`. See docs/operations/opentelemetry.md. `None`: no spans.
        check_on_load: compare a small batch with transformers' attention before serving.
        native_forward: on a CPU, run decoders of the llama family as one native call, and the linear layers of
            other models with the native kernel, on weights packed at load. On a GPU, run recognised norms, rotary
            embeddings and gated MLPs with fused kernels, on merged projections.
        quantization: "int8" (CPU), "fp8" (GPU of compute capability 8.9) and "int4" (CPU, GPU of 8.0) store the weights
            of linear layers in eight or four bits. On a CPU, inputs are quantized to eight bits. A GPU needs dtype
            bfloat16 or float16, and leaves the head as it is. `None`: as loaded; a quantized checkpoint needs none.
            The other values name how the checkpoint is stored, as vLLM's do, and are refused if it is not.
        head_bits: of the head's weights on a CPU with `quantization` "int8" or "int4". `None`: 8.
        max_replays: when the engine process dies, the next one continues its requests. A request fails when it alone
            can be the cause of more than this many deaths, with no token between them. 0: all running ones fail.
        engine_timeout: seconds in which the engine process must finish a step, or show that nothing runs; a large step
            has ten times the usual time. Otherwise it is killed and replaced, and its requests continue.
        spare_engine: keep a spare process that has done its imports, and on a CPU has kept weights mapped. Each engine
            process is a fork of it, so the next engine is ready sooner. It takes no CPU time while it waits, and shares
            its memory with the engine.
        engine_start_timeout: seconds that the engine process can take to load the checkpoint.
        shared_step_rows: while other requests run, most sequences of one request in a step, unless all narrower
            requests together have more than half as many; its sequences take turns. Fewer, if measured steps with so
            many take more than three times as long as with one. `None`: all are in every step.
        short_prompt_share: share of the prompt tokens that steps compute, from 0 to 0.9, that short prompts may take
            ahead of prompts that came before them, under scheduling_policy "fcfs". 0: strictly in the order of arrival.
        shed_on_predicted_wait: refuse a request with a timeout at once, with UNAVAILABLE and a retry hint, if it
            would have to wait and is predicted to end after its deadline. One that can start at once is never refused.
        drain_timeout: seconds for running requests to finish once the model accepts no new ones: before an unload or
            the server's end, after a reload, and on request. Then they end with UNAVAILABLE.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    trust_remote_code: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: Annotated[int, Meta(ge=2, le=_MAX_COUNT)] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 256
    max_num_batched_tokens: _PositiveInt | None = None
    itl_target_ms: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    max_num_partial_prefills: _PositiveInt = 1
    max_long_partial_prefills: _PositiveInt = 1
    long_prefill_token_threshold: Annotated[int, Meta(ge=0, le=_MAX_COUNT)] = 0
    async_scheduling: bool | Literal["auto"] = "auto"
    speculative_config: SpeculativeConfig | None = None
    pooler_config: PoolerConfig = PoolerConfig()
    hf_overrides: HfOverrides = HfOverrides()
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
    kv_tiers: list[KVTier] = []
    kv_store_secret_file: str | None = None
    kv_listen: str | None = None
    kv_events_config: KVEventsConfig | None = None
    attention_backend: str = "auto"
    kernel_config: KernelConfig = KernelConfig()
    max_queue_size: Annotated[int, Meta(ge=0, le=_MAX_COUNT)] = 1024
    scheduling_policy: Literal["fcfs", "priority", "sjf", "edf"] = "fcfs"
    priority_aging_seconds: _Seconds = 300.0
    sjf_aging_seconds: _Seconds = 0.1
    edf_default_timeout: _Seconds = 60.0
    priority_classes: dict[Annotated[int, Meta(ge=-_MAX_COUNT - 1, le=_MAX_COUNT)], PriorityClass] = {}
    tenants: dict[str, TenantOptions] = {}
    tenant_header: Annotated[str, Meta(pattern=r"^[A-Za-z0-9]+(-[A-Za-z0-9]+)+$", max_length=100)] | None = None
    stream_interval: _PositiveInt | Literal["auto"] = "auto"
    default_max_tokens: _PositiveInt = 16
    generation_config: str | None = None
    max_logprobs: Annotated[int, Meta(ge=-1, le=_MAX_COUNT)] = 100
    max_n: Annotated[int, Meta(ge=1, le=16384)] = 128
    max_pooled_inputs: Annotated[int, Meta(ge=1, le=2**20)] = 2048
    max_stop_strings: _PositiveInt = 1024
    max_bad_words: _PositiveInt = 1024
    max_stop_token_ids: _PositiveInt = 1024
    max_stop_bytes: _PositiveInt = 2**18
    max_name_bytes: _PositiveInt = 1024
    max_input_bytes: _PositiveInt = 2**23
    exclude_input_in_output: bool | None = None
    wire_format: Literal["vllm", "tensorrt_llm"] = "vllm"
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cpu_threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    chat_template: str | None = None
    chat_template_timeout: Annotated[float, Meta(ge=0.01, le=3600)] = 2.0
    trust_request_chat_template: bool = False
    enforce_eager: bool = False
    max_cudagraph_capture_size: Annotated[int, Meta(ge=0, le=2048)] = 0
    disable_log_stats: bool = False
    python_executable: str | None = None
    step_trace: bool | Annotated[int, Meta(ge=1, le=1_000_000)] = False
    otlp_traces_endpoint: str | None = None
    check_on_load: bool = True
    native_forward: bool = True
    quantization: Literal["int8", "fp8", "int4", _Stored] | None = None
    head_bits: Literal[4, 6, 8, 16] | None = None
    max_replays: Annotated[int, Meta(ge=0, le=_MAX_COUNT)] = 2
    engine_timeout: _Seconds = 60.0
    spare_engine: bool = True
    engine_start_timeout: _Seconds = 600.0
    shared_step_rows: _PositiveInt | None = 32
    short_prompt_share: Annotated[float, Meta(ge=0, le=0.9)] = 0.25
    shed_on_predicted_wait: bool = True
    drain_timeout: Annotated[float, Meta(ge=0, le=1e6)] = 30.0

    def __post_init__(self) -> None:
        if self.kv_cache_memory is not None and _bytes_of("kv_cache_memory", self.kv_cache_memory) <= 0:
            raise ConfigError(f"kv_cache_memory={self.kv_cache_memory!r}: must be more than 0 bytes")
        if self.speculative_config is not None:
            _bytes_of("speculative_config.kv_cache_memory", self.speculative_config.kv_cache_memory)
        for index, tier in enumerate(self.kv_tiers):
            if tier.size is not None and _bytes_of(f"kv_tiers[{index}].size", tier.size) <= 0:
                raise ConfigError(f"kv_tiers[{index}].size={tier.size!r}: must be more than 0 bytes")
        if self.kv_tiers and not self.enable_prefix_caching:
            raise ConfigError("kv_tiers with enable_prefix_caching=false, which lets no request use KV of another one")
        if self.otlp_traces_endpoint is not None and not re.match(r"https?://[^/\s]+", self.otlp_traces_endpoint):
            raise ConfigError(
                f"otlp_traces_endpoint={self.otlp_traces_endpoint!r}: give a URL of a collector that takes OTLP over "
                "HTTP, such as http://127.0.0.1:4318"
            )
        if not self.swap_bytes and self.preemption_mode == "swap":
            raise ConfigError('preemption_mode="swap" needs host memory for the blocks: set swap_space (4 means 4 GiB)')
        if self.max_cudagraph_capture_size and self.attention_backend == "flash3":
            raise ConfigError(
                f'max_cudagraph_capture_size={self.max_cudagraph_capture_size} with attention_backend="flash3", whose '
                'steps with prompts cannot be captured; set it to 0, or use attention_backend="gpu"'
            )
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ConfigError(
                f"max_long_partial_prefills={self.max_long_partial_prefills} is more than "
                f"max_num_partial_prefills={self.max_num_partial_prefills}, which includes long prompts; lower it"
            )
        named = [name for name, options in self.tenants.items() if name != "*" and options.per_name is not None]
        if named:
            raise ConfigError(f'tenants: per_name is for "*", which has no name; remove it from {named[0]!r}')
        if self.max_model_len is not None and self.long_prefill_token_threshold > self.max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} is more than "
                f"max_model_len={self.max_model_len}: no prompt is that long; lower it, or set it to 0"
            )

    @property
    def launches_ahead(self) -> bool:
        """What `async_scheduling` says; "auto" follows `device`, which `pipeline.placed` has replaced by its name."""
        return self.device == "cuda" if self.async_scheduling == "auto" else self.async_scheduling

    @property
    def step_tokens(self) -> int:
        """`max_num_batched_tokens`, or its default for `device`, which `pipeline.placed` has replaced by its name."""
        return self.max_num_batched_tokens or _STEP_TOKENS[self.device == "cuda"]

    @property
    def swap_bytes(self) -> int:
        """Host memory for swapped KV blocks, in bytes."""
        if isinstance(self.swap_space, str) and not re.fullmatch(r"\s*[0-9.]+\s*", self.swap_space):
            return _bytes_of("swap_space", self.swap_space)
        return int(float(self.swap_space) * 2**30)

    @property
    def num_traced_steps(self) -> int:
        """Steps that the step trace keeps; 0 if it is off."""
        return _TRACED_STEPS if self.step_trace is True else int(self.step_trace)

    @property
    def tokenizer_source(self) -> str:
        """Directory or hub id that the tokenizer is loaded from."""
        return self.tokenizer or self.model

    @property
    def tokenizer_source_revision(self) -> str | None:
        """Hub revision of `tokenizer_source`."""
        return self.tokenizer_revision or self.revision

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "model.json") -> EngineConfig:
        """Build from decoded JSON; numbers and booleans can be strings.

        vLLM's names, spellings and options without a choice are accepted too (`inflight.vllm_options`).

        Raises:
            ConfigError: an unknown key (with the nearest known one), a wrong type or a value out of range.
        """
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: expected a JSON object, got {type(values).__name__}")
        try:
            values = translated(values)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from None
        known = cls.__struct_fields__
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
                raise ConfigError(f"{source}: unknown key {key!r}; {hint}")
            _check_encodable(key, values[key], source)
        if "model" not in values:
            raise ConfigError(f'{source}: "model" is missing; set it to a checkpoint, a GGUF file or a hub id')
        try:
            return msgspec.convert(values, cls, str_keys=True, strict=False)  # "8" and "true" are values, too
        except msgspec.ValidationError as error:
            at = re.search(r"\$\.(\w+)", str(error))
            got = f"{at[1]}={values.get(at[1])!r}: " if at else ""
            if at and at[1] == "kv_tiers":
                got = "kv_tiers: "  # its URLs, and a text in place of one, can contain a password
            choices = _choices(get_type_hints(cls)[at[1]], str(error)) if at else ()
            allowed = f"; must be one of {', '.join(map(repr, choices))}" if choices else ""
            raise ConfigError(f"{source}: {got}{str(error).split(' - at ')[0]}{allowed}") from None
