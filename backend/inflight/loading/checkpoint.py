"""A checkpoint's configuration and weights, by transformers."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from inflight.attention.hf import IMPLEMENTATION
from inflight.config import ConfigError, EngineConfig
from inflight.loading.errors import LoadError
from inflight.loading.fp8_checkpoint import bytes_saved, load_fp8, quant_method
from inflight.loading.fp8_linear import placed
from inflight.runner.memory import available_memory, format_bytes

__all__ = ["check_weights_fit", "dtype_of", "eos_token_ids", "load_weights", "max_model_len", "read_config"]


def read_config(config: EngineConfig) -> Any:
    """The checkpoint's transformers configuration.

    Raises:
        LoadError: it cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:
        raise LoadError(f"model={config.model!r} is not a readable checkpoint: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """A library's error in one line: the first, and the second if the first only introduces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def dtype_of(name: str, text_config: Any) -> torch.dtype:
    """The dtype called `name`; "auto" is the checkpoint's.

    Raises:
        LoadError: the checkpoint's dtype is not supported.
    """
    if name != "auto":
        return getattr(torch, name)
    dtype = getattr(text_config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise LoadError(f'the checkpoint\'s dtype is {dtype}; set "dtype" to float32, bfloat16 or float16')
    return dtype


def max_model_len(config: EngineConfig, text_config: Any) -> int:
    """Maximum tokens per request, by the configuration or the checkpoint.

    Raises:
        ConfigError: neither has a limit, or the configuration's exceeds the checkpoint's.
    """
    positions = getattr(text_config, "max_position_embeddings", None)
    chunk = getattr(text_config, "attention_chunk_size", None)
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if "chunked_attention" in kinds and chunk is not None:
        positions = min(positions or chunk, chunk)  # within one chunk, chunked attention is full attention
    if config.max_model_len is None:
        if positions is None:
            raise ConfigError("the checkpoint has no max_position_embeddings; set max_model_len in model.json")
        return int(positions)
    if positions is not None and config.max_model_len > positions:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the checkpoint's {positions} positions; lower it"
        )
    return config.max_model_len


def check_weights_fit(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Compare the size of the weights with the free memory before reading or making them.

    Raises:
        LoadError: they do not fit (by how much), or a file is damaged.
    """
    files = sorted(Path(config.model).glob("*.safetensors")) if Path(config.model).is_dir() else []
    try:
        if config.load_format == "dummy":
            model = _from_config(config, hf_config, dtype, torch.device("meta"))
            need = sum(parameter.nbytes for parameter in model.parameters())
        else:
            need = sum(map(_num_weights, files)) * dtype.itemsize
            if files:
                on_meta = partial(_from_config, config, hf_config, dtype, torch.device("meta"))
                need -= bytes_saved(config, hf_config, dtype, device, on_meta)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{config.model!r}: a .safetensors file is damaged or incomplete; download it again") from error
    free = available_memory(device)
    if need > free:
        raise LoadError(
            f"the weights of {config.model!r} take {format_bytes(need)} as {str(dtype).removeprefix('torch.')}, "
            f"{format_bytes(need - free)} more than the {format_bytes(free)} free on {device}"
        )


def _num_weights(file: Path) -> int:
    """Number of elements in a safetensors file, from its header."""
    with safe_open(file, framework="pt") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def load_weights(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model on `device`, with our attention implementation.

    Raises:
        LoadError: transformers cannot load it, or weights are missing or of other shapes.
    """
    if config.load_format == "dummy":
        return _dummy_weights(config, hf_config, dtype, device)
    if quant_method(hf_config) is not None:
        return load_fp8(config, hf_config, dtype, device, load_weights)
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            config.model,
            config=hf_config,
            dtype=dtype,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # rejected below, by name
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, ImportError, SafetensorError) as error:
        raise _cannot_load(config, hf_config, error) from error
    where = f"{config.model!r} ({hf_config.model_type}) cannot be loaded"
    if report["mismatched_keys"]:
        name, found, expected = min(report["mismatched_keys"])
        raise LoadError(
            f"{where}: its weights do not match its config.json: {name} has shape {list(found)}, not {list(expected)}"
        )
    if report["missing_keys"]:  # transformers initialises them randomly
        missing = sorted(report["missing_keys"])
        raise LoadError(f"{where}: {len(missing)} weights are in none of its files, such as {missing[0]}")
    return placed(config, hf_config, model, device).eval().requires_grad_(False)


def _dummy_weights(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Random weights as the model's own initialisation makes them before training: small, so logits stay finite."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        model = _from_config(config, hf_config, dtype, device)
        return placed(config, hf_config, model, device).eval().requires_grad_(False)


def _from_config(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model that config.json describes, made on `device`.

    Raises:
        LoadError: transformers cannot make it.
    """
    try:
        with device:
            return AutoModelForCausalLM.from_config(
                hf_config,
                dtype=dtype,
                trust_remote_code=config.trust_remote_code,
                attn_implementation=IMPLEMENTATION,
            )
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise _cannot_load(config, hf_config, error) from error


def _cannot_load(config: EngineConfig, hf_config: Any, error: Exception) -> LoadError:
    reason = _reason(error)
    if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
        reason = "its attention does not use transformers' AttentionInterface"
    return LoadError(f"{config.model!r} ({hf_config.model_type}) cannot be loaded: {reason}")


def eos_token_ids(model: nn.Module, text_config: Any) -> list[int]:
    """EOS ids of the generation configuration, else of the model's."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    if eos is None:
        return []
    return [int(eos)] if isinstance(eos, int) else [int(token) for token in eos]
