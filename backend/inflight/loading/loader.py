"""`load`: from a checkpoint to a forward pass with paged attention and a KV pool.

`AutoModelForCausalLM` loads the checkpoint with our attention implementation; a probe then finds each
layer's attention.  Unsupported features are rejected here, by name, before the first request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from inflight.attention.base import KV_DTYPES, AttentionBackend, KVCache, LayerAttention, LayerSpec
from inflight.attention.selection import select_backend
from inflight.config import ConfigError, EngineConfig
from inflight.loading.acceleration import CannotQuantize, accelerate
from inflight.loading.checkpoint import (
    check_weights_fit,
    dtype_of,
    eos_token_ids,
    load_weights,
    max_model_len,
    read_config,
)
from inflight.loading.checks import lengths_that_fit, reference, relative_error
from inflight.loading.errors import LoadError
from inflight.loading.memory_plan import num_host_blocks, num_pool_blocks
from inflight.loading.probe import activation_bytes, probe
from inflight.runner.swap import HostCache

__all__ = ["CheckpointInfo", "LoadError", "LoadedModel", "load"]

# Relative error of the logits that rounding explains: in half precision it may change the choice of experts.  A
# dropped positional bias or a leak between sequences costs far more.  int8 keys and values cost about 1% (measured on
# every architecture), several times that with outliers; fp8 rounds each number by up to 6%.
_CHECK_TOLERANCE = {
    torch.float32: 1e-3,
    torch.float16: 0.1,
    torch.bfloat16: 0.25,
    torch.int8: 0.1,
    torch.float8_e4m3fn: 0.25,
}
_INT8_TOLERANCE = 0.25  # with weights and activations in int8


@dataclass
class CheckpointInfo:
    """Facts about the loaded checkpoint for the engine and the frontend.

    Attributes:
        max_model_len: maximum tokens per request; never more than the pool can hold.
        vocab_size: logits per token.
        eos_token_ids: ids that end a request unless it ignores them.
        num_blocks: KV blocks in the pool.
        kv_bytes: size of the pool.
        num_host_blocks: KV blocks in host memory, for swapped requests.
        swap_seconds_per_block: measured time to copy a block to the host and back.
        load_seconds: time that `load` took.
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
    """Ready for ragged batches.

    Attributes:
        model: `model(input_ids[1, T], position_ids[1, T], ...)` in a forward context of `backend`: transformers'
            module or its replacement.
        host_cache: host memory for swapped requests, if any.
    """

    model: Any
    backend: AttentionBackend
    info: CheckpointInfo
    device: torch.device
    dtype: torch.dtype
    host_cache: HostCache | None


def load(config: EngineConfig) -> LoadedModel:
    """Load and probe the model, allocate the pool, attach attention, and check the logits.

    Raises:
        LoadError: not a checkpoint, an unsupported architecture or feature, or not enough memory.
        ConfigError: an option that contradicts the checkpoint.
    """
    start = time.perf_counter()
    device = _device(config.device)
    hf_config = read_config(config)
    text_config = hf_config.get_text_config(decoder=True)
    dtype, length = dtype_of(config.dtype, text_config), max_model_len(config, text_config)
    check_weights_fit(config, dtype, device)
    model = load_weights(config, hf_config, dtype, device)
    kv_dtype = KV_DTYPES[config.kv_cache_dtype]
    layers = [
        (module, replace(spec, kv_cache_dtype=kv_dtype)) for module, spec in probe(model, text_config, length, device)
    ]
    specs = [spec for _, spec in layers]
    backend = select_backend(config.attention_backend, specs, dtype, config.block_size, device)
    bytes_per_block = config.block_size * sum(spec.bytes_per_token(dtype) for spec in specs)
    activations = activation_bytes(model, config, device)
    num_blocks = num_pool_blocks(config, bytes_per_block, length, device, activations)
    host_blocks = num_host_blocks(config, bytes_per_block, num_blocks, device)
    caches = _attach(layers, backend, num_blocks, config, dtype, device)
    lengths = lengths_that_fit(length, num_blocks, config.block_size)
    forward = _checked_forward(model, backend, text_config, config, lengths, dtype, device)
    host_cache = HostCache(caches, host_blocks) if host_blocks else None
    info = CheckpointInfo(
        max_model_len=length,
        vocab_size=int(text_config.vocab_size),
        eos_token_ids=eos_token_ids(model, text_config),
        num_blocks=num_blocks,
        kv_bytes=num_blocks * bytes_per_block,
        num_host_blocks=host_blocks,
        swap_seconds_per_block=host_cache.seconds_per_block() if host_cache else 0.0,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention_backend=backend.name,
        load_seconds=time.perf_counter() - start,
    )
    return LoadedModel(forward, backend, info, device, dtype, host_cache)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise LoadError('device="cuda", but torch finds no CUDA device; install a CUDA build of torch or use "cpu"')
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _attach(
    layers: list[tuple[nn.Module, LayerSpec]],
    backend: AttentionBackend,
    num_blocks: int,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> list[KVCache]:
    """Allocate each layer's cache and attach it to the attention module."""
    caches = []
    for module, spec in layers:
        cache = backend.new_cache(num_blocks, config.block_size, spec, dtype, device)
        if config.itl_target_ms is not None and device.type == "cpu":
            # Otherwise the first write to each page waits for the system to provide it: with huge pages on a
            # virtual machine tens of milliseconds every few thousand tokens, which no step budget accounts for.
            cache.key.zero_()
            cache.value.zero_()
        caches.append(cache)
        module.inflight = LayerAttention(spec, backend, cache)  # type: ignore[assignment]
    return caches


def _checked_forward(
    model: nn.Module,
    backend: AttentionBackend,
    text_config: Any,
    config: EngineConfig,
    lengths: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """The fastest forward pass that agrees with transformers' attention."""
    int8 = config.quantization == "int8"
    if int8 and (device.type != "cpu" or not config.native_forward):
        raise ConfigError('quantization="int8" requires a CPU and native_forward; remove it')
    kv_dtype = KV_DTYPES[config.kv_cache_dtype] or dtype
    tolerance = max(_CHECK_TOLERANCE[dtype], _CHECK_TOLERANCE[kv_dtype], _INT8_TOLERANCE if int8 else 0.0)
    expected = reference(model, int(text_config.vocab_size), lengths, device) if config.check_on_load else None

    def error(forward: Any) -> float:
        if expected is None:
            return 0.0
        return relative_error(forward, backend, expected, config.block_size, device)

    forward = model
    if config.native_forward:
        try:
            forward = accelerate(model, device, lambda candidate: error(candidate) <= tolerance, int8)
        except CannotQuantize as why:
            raise LoadError(f'quantization="int8" is not supported: {why}; remove it') from why
    off = error(forward)
    if not off <= tolerance:
        raise LoadError(
            f"model type {text_config.model_type!r} is not supported: the logits of a test batch differ by "
            f"{off:.1%} (tolerance: {tolerance:.1%}) from those of transformers' attention, so paged attention drops "
            "a feature of the model; set check_on_load to false only if you know why they differ"
        )
    return forward
