"""Hugging Face checkpoint -> module with paged attention attached and a KV pool that fits.

The checkpoint is loaded by `AutoModelForCausalLM` with our attention implementation.  A probe
forward then tells what each layer's attention looks like; what cannot be served right is refused
here, by name, before the first request.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from inflight.attention.base import KV_DTYPES, KVCache, LayerAttention, LayerSpec
from inflight.attention.hf import IMPLEMENTATION, UnsupportedAttention, probe_layers
from inflight.attention.selection import select_backend
from inflight.config import ConfigError, EngineConfig, parse_bytes
from inflight.loading.acceleration import CannotQuantize, accelerate
from inflight.loading.self_check import Reference, lengths_that_fit, reference, relative_error
from inflight.runner.memory import available_memory, format_bytes
from inflight.runner.swap import HostCache

__all__ = ["CheckpointInfo", "LoadError", "LoadedModel", "load"]

# Share of the free RAM that the KV pool takes on a CPU when `kv_cache_memory` is not set.  Pages
# are touched on first use only (`_touch` is the exception), so this is a ceiling, not a cost.
_CPU_KV_SHARE = 0.4
# Relative error of the logits that rounding explains: a router of experts may turn on it in half
# precision, whereas a dropped positional bias or a leak between sequences costs far more.  Keys and
# values in int8 cost about 1% (measured on every architecture), some times that with outliers; fp8 rounds
# each number by up to 6%.
_CHECK_TOLERANCE = {
    torch.float32: 1e-3,
    torch.float16: 0.1,
    torch.bfloat16: 0.25,
    torch.int8: 0.1,
    torch.float8_e4m3fn: 0.25,
}
_INT8_TOLERANCE = 0.25  # of weights and activations in eight bits
# Kept free on a GPU for what the allocator fragments and the CUDA context grows by.
_GPU_HEADROOM = 150 * 2**20


class LoadError(RuntimeError):
    """The checkpoint cannot be served on this machine; the message says what to change."""


@dataclass
class CheckpointInfo:
    """Facts of the loaded checkpoint that the engine and the frontend need.

    Attributes:
        max_model_len: most tokens of one request; never more than the pool can hold.
        vocab_size: logits per token.
        eos_token_ids: ids that end a request unless it ignores them.
        num_blocks: KV blocks in the pool.
        kv_bytes: bytes of the pool.
        num_host_blocks: KV blocks in host memory, for swapped requests.
        swap_seconds_per_block: measured time to copy a block there and back.
        load_seconds: time from start to ready.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_blocks: int
    kv_bytes: int
    num_host_blocks: int
    swap_seconds_per_block: float
    dtype: str
    device: str
    attention_backend: str
    load_seconds: float


@dataclass
class LoadedModel:
    """Ready for ragged batches: `model(input_ids[1, T], position_ids[1, T], ...)`, transformers' module or what
    stands for it."""

    model: Any
    info: CheckpointInfo
    device: torch.device
    dtype: torch.dtype
    host_cache: HostCache | None


def load(config: EngineConfig) -> LoadedModel:
    """Load, probe, attach attention, allocate the pool.

    Raises:
        LoadError: not a checkpoint, an architecture or feature that cannot be served, too little memory.
        ConfigError: an option that contradicts the checkpoint.
    """
    start = time.perf_counter()
    device = _device(config.device)
    hf_config = _read_config(config)
    text_config = hf_config.get_text_config(decoder=True)
    dtype = _dtype(config.dtype, text_config)
    max_model_len = _max_model_len(config, text_config)
    _check_weights_fit(config, dtype, device)
    model = _load_weights(config, hf_config, dtype, device)
    kv_dtype = KV_DTYPES[config.kv_cache_dtype]
    probed = _probe(model, text_config, max_model_len, device)
    layers = [(module, replace(spec, kv_cache_dtype=kv_dtype)) for module, spec in probed]
    specs = [spec for _, spec in layers]
    backend = select_backend(config.attention_backend, specs, dtype, config.block_size, device)
    bytes_per_block = config.block_size * sum(spec.bytes_per_token(dtype) for spec in specs)
    activations = _activation_bytes(model, config, device)
    num_blocks = _num_blocks(config, bytes_per_block, max_model_len, device, activations)
    num_host_blocks = _num_host_blocks(config, bytes_per_block, num_blocks, device)
    caches = []
    for module, spec in layers:
        cache = backend.new_cache(num_blocks, config.block_size, spec, dtype, device)
        if config.itl_target_ms is not None and device.type == "cpu":
            _touch(cache)
        caches.append(cache)
        module.inflight = LayerAttention(spec, backend, cache)  # type: ignore[assignment]
    tolerance = max(_CHECK_TOLERANCE[dtype], _CHECK_TOLERANCE.get(kv_dtype or dtype, 0.0))
    lengths = lengths_that_fit(max_model_len, num_blocks, config.block_size)
    forward = _checked(model, text_config, config, lengths, device, tolerance)
    host_cache = HostCache(caches, num_host_blocks) if num_host_blocks else None
    info = CheckpointInfo(
        max_model_len=max_model_len,
        vocab_size=int(text_config.vocab_size),
        eos_token_ids=_eos_token_ids(model, text_config),
        num_blocks=num_blocks,
        kv_bytes=num_blocks * bytes_per_block,
        num_host_blocks=num_host_blocks,
        swap_seconds_per_block=host_cache.seconds_per_block() if host_cache else 0.0,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention_backend=backend.name,
        load_seconds=time.perf_counter() - start,
    )
    return LoadedModel(forward, info, device, dtype, host_cache)


def _touch(cache: KVCache) -> None:
    """Have the system give the pool its pages now.

    Each page costs the step that writes to it first: where the pages are huge and the machine is a
    virtual one, tens of milliseconds every few thousand tokens, which no plan of the step foresees.
    """
    cache.key.zero_()
    cache.value.zero_()


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise LoadError('device="cuda", but torch sees no CUDA device here: install a CUDA build of torch or use "cpu"')
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _read_config(config: EngineConfig) -> Any:
    try:
        return AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:
        raise LoadError(f"model={config.model!r} is not a checkpoint that can be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """A library's error in one line: its first, and the next where that one only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _dtype(name: str, text_config: Any) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    dtype = getattr(text_config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise LoadError(f'the checkpoint\'s dtype is {dtype}: set "dtype" to float32, bfloat16 or float16')
    return dtype


def _max_model_len(config: EngineConfig, text_config: Any) -> int:
    positions = getattr(text_config, "max_position_embeddings", None)
    chunk = getattr(text_config, "attention_chunk_size", None)
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if "chunked_attention" in kinds and chunk is not None:
        positions = min(positions or chunk, chunk)  # within one chunk, chunked attention is full attention
    if config.max_model_len is None:
        if positions is None:
            raise ConfigError("the checkpoint names no max_position_embeddings: set max_model_len in model.json")
        return int(positions)
    if positions is not None and config.max_model_len > positions:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the checkpoint's {positions} positions: lower it"
        )
    return config.max_model_len


def _check_weights_fit(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse before loading what the memory cannot hold, and say by how much."""
    files = sorted(Path(config.model).glob("*.safetensors")) if Path(config.model).is_dir() else []
    try:
        need = sum(map(_weight_count, files)) * dtype.itemsize
    except Exception as error:  # whatever the bytes of a damaged header make of themselves
        raise LoadError(f"{config.model!r}: a .safetensors file is damaged or incomplete; fetch it again") from error
    free = available_memory(device)
    if need > free:
        raise LoadError(
            f"the weights of {config.model!r} take {format_bytes(need)} as {str(dtype).removeprefix('torch.')}, "
            f"{format_bytes(need - free)} more than the {format_bytes(free)} that are free on {device}"
        )


def _weight_count(file: Path) -> int:
    """Elements in a safetensors file, from its header alone."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    return sum(int(torch.Size(shape).numel()) for shape in shapes)


def _load_weights(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    transformers_logging.disable_progress_bar()
    where = f"{config.model!r} ({hf_config.model_type}) cannot be loaded"
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            config.model,
            config=hf_config,
            dtype=dtype,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, ImportError, SafetensorError) as error:
        reason = _reason(error)
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            reason = "its attention does not go through transformers' AttentionInterface"
        raise LoadError(f"{where}: {reason}") from error
    if report["mismatched_keys"]:
        name, there, wanted = min(report["mismatched_keys"])
        raise LoadError(f"{where}: its weights do not fit its config.json: {name} is {list(there)}, not {list(wanted)}")
    if report["missing_keys"]:  # transformers would draw them at random
        missing = sorted(report["missing_keys"])
        raise LoadError(f"{where}: {len(missing)} of its weights are in no file, {missing[0]} among them")
    return model.to(device).eval().requires_grad_(False)


@torch.inference_mode()
def _probe(
    model: nn.Module, text_config: Any, max_model_len: int, device: torch.device
) -> list[tuple[nn.Module, LayerSpec]]:
    """Run two tokens through the model and read off each layer's attention."""
    kind = text_config.model_type
    token_ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    with probe_layers() as layers:
        try:
            model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=1)
        except UnsupportedAttention as error:
            raise LoadError(f"model type {kind!r} cannot be served: {error}") from error
        except (TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise LoadError(f"model type {kind!r} cannot run a ragged batch: {error}") from error
    expected = getattr(text_config, "num_hidden_layers", len(layers))
    if len(layers) != expected or len({id(module) for module, _ in layers}) != len(layers):
        raise LoadError(
            f"model type {kind!r} cannot be served: {len(layers)} attention calls for {expected} layers; each layer "
            "must call its attention once through transformers' AttentionInterface (no state-space, convolution or "
            "shared layers)"
        )
    _check_layer_types(text_config, layers, max_model_len)
    return layers


def _check_layer_types(text_config: Any, layers: list[tuple[nn.Module, LayerSpec]], max_model_len: int) -> None:
    """A window that lives only in transformers' mask would be dropped in silence: refuse it."""
    layer_types = getattr(text_config, "layer_types", None) or ["full_attention"] * len(layers)
    for index, (layer_type, (_, spec)) in enumerate(zip(layer_types, layers)):
        if layer_type == "sliding_attention":
            window = getattr(text_config, "sliding_window", None)
            if spec.sliding_window is None and window is not None and window < max_model_len:
                raise LoadError(
                    f"model type {text_config.model_type!r}: layer {index} has a sliding window of {window} tokens "
                    f"that it does not pass to its attention; set max_model_len to at most {window}"
                )
        elif layer_type not in ("full_attention", "attention", "chunked_attention"):
            raise LoadError(
                f"model type {text_config.model_type!r}: layer {index} is of type {layer_type!r}; "
                "only full, sliding and chunked attention can be served"
            )


@torch.inference_mode()
def _activation_bytes(model: nn.Module, config: EngineConfig, device: torch.device) -> int:
    """Peak bytes that the largest step takes on a GPU beside weights and KV pool; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    num_tokens = config.max_num_batched_tokens
    token_ids = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    positions = torch.arange(num_tokens, device=device)[None]
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with probe_layers():
        rows = min(config.max_num_seqs, num_tokens)
        out = model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
        out.logits.float()
    return torch.cuda.max_memory_allocated(device) - before


def _checked(
    model: nn.Module,
    text_config: Any,
    config: EngineConfig,
    lengths: list[int],
    device: torch.device,
    tolerance: float,
) -> Any:
    """The forward pass to serve with: the fastest that agrees with transformers' own attention."""
    expected: Reference | None = None
    if config.check_on_load:
        expected = reference(model, int(text_config.vocab_size), lengths, device)

    def error(forward: Any) -> float:
        return 0.0 if expected is None else relative_error(forward, expected, config.block_size, device)

    forward = model
    int8 = config.quantization == "int8"
    if int8 and (device.type != "cpu" or not config.native_forward):
        raise ConfigError('quantization="int8" runs on a CPU with native_forward: leave it out')
    if config.native_forward:
        tolerance = max(tolerance, _INT8_TOLERANCE) if int8 else tolerance
        try:
            forward = accelerate(model, device, lambda candidate: error(candidate) <= tolerance, int8)
        except CannotQuantize as why:
            raise LoadError(f'quantization="int8" cannot be served: {why}; leave it out') from why
    off = error(forward)
    if not off <= tolerance:
        raise LoadError(
            f"model type {text_config.model_type!r} cannot be served: on a test batch its logits are off by "
            f"{off:.1%} (allowed: {tolerance:.1%}) from transformers' own attention, so it carries something that "
            "paged attention would drop; set check_on_load to false only if you know why they differ"
        )
    return forward


def _num_blocks(
    config: EngineConfig, bytes_per_block: int, max_model_len: int, device: torch.device, activations: int
) -> int:
    """Blocks that the memory holds; at least one request of `max_model_len` must fit."""
    most_useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        source = f"num_gpu_blocks_override={num_blocks}"
    else:
        budget, source = _kv_budget(config, device, activations)
        num_blocks = min(budget // bytes_per_block, most_useful)
    need = -(-max_model_len // config.block_size)
    if num_blocks < need:
        tokens = num_blocks * config.block_size
        raise LoadError(
            f"the KV pool ({source}) holds {tokens} tokens in {num_blocks} blocks, but one request of "
            f"max_model_len={max_model_len} takes {need} blocks: {format_bytes((need - num_blocks) * bytes_per_block)} "
            f"are missing; raise kv_cache_memory, or set max_model_len to at most {tokens}"
        )
    return num_blocks


def _num_host_blocks(config: EngineConfig, bytes_per_block: int, num_blocks: int, device: torch.device) -> int:
    """Blocks that `swap_space` holds; no memory is taken where none would be swapped."""
    if config.preemption_mode == "recompute" or not config.swap_bytes:
        return 0
    host = torch.device("cpu")
    free = available_memory(host) - (num_blocks * bytes_per_block if device == host else 0)
    if config.swap_bytes > free:
        raise LoadError(
            f"swap_space={config.swap_space!r} is {format_bytes(config.swap_bytes)} of host memory, but "
            f"{format_bytes(max(0, free))} are free beside the KV pool: lower it"
        )
    num_host_blocks = config.swap_bytes // bytes_per_block
    if not num_host_blocks:
        raise LoadError(
            f"swap_space={config.swap_space!r} holds no KV block of {format_bytes(bytes_per_block)}: raise it, or set 0"
        )
    return num_host_blocks


def _kv_budget(config: EngineConfig, device: torch.device, activations: int) -> tuple[int, str]:
    if config.kv_cache_memory is not None:
        return parse_bytes(config.kv_cache_memory), f"kv_cache_memory={config.kv_cache_memory!r}"
    free = available_memory(device)
    if device.type == "cpu":
        return int(free * _CPU_KV_SHARE), f"{_CPU_KV_SHARE:.0%} of {format_bytes(free)} free RAM"
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = int(total * config.gpu_memory_utilization) - (total - free) - activations - _GPU_HEADROOM
    return max(0, allowed), f"gpu_memory_utilization={config.gpu_memory_utilization} of {format_bytes(total)}"


def _eos_token_ids(model: nn.Module, text_config: Any) -> list[int]:
    """EOS ids of the generation config, else of the model config."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    if eos is None:
        return []
    return [int(eos)] if isinstance(eos, int) else [int(token) for token in eos]
