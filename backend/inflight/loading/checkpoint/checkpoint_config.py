"""A checkpoint's configuration, by transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from inflight.config import ConfigError, EngineConfig
from inflight.gguf.hub_names import listed
from inflight.hub import CheckpointFileError, checkpoint_file, gguf_file, gguf_names, snapshot
from inflight.loading.checkpoint.headless import is_headless
from inflight.loading.load_errors import LoadError, in_one_line

__all__ = ["dtype_of", "eos_token_ids", "max_model_len", "read_config"]


def read_config(config: EngineConfig) -> Any:
    """The checkpoint's transformers configuration.

    Raises:
        LoadError: it cannot be read.
    """
    try:
        file = gguf_file(config.model, config.revision)  # each says in seconds that the hub does not answer
        if checkpoint_file(config.model, "config.json", config.revision) is None:
            raise LoadError(f"model={config.model!r} has no config.json{_gguf_files(config)}")
        source = config.model if file is None else str(snapshot(config.model, config.revision))
    except CheckpointFileError as error:
        raise LoadError(str(error)) from None
    try:
        found = AutoConfig.from_pretrained(source, revision=config.revision, trust_remote_code=config.trust_remote_code)
    except Exception as error:
        raise LoadError(f"model={config.model!r} is not a readable checkpoint: {in_one_line(error)}") from error
    if is_headless(config):  # the logits of its embedding mean nothing, but the model can be checked as any other
        found.tie_word_embeddings = found.get_text_config(decoder=True).tie_word_embeddings = True
    return found


def _gguf_files(config: EngineConfig) -> str:
    """Names of GGUF files to give instead, if the checkpoint has any, for a message."""
    names = gguf_names(config.model, config.revision)
    return f", only GGUF files; give {config.model}/FILE, which is one of {listed(names)}" if names else ""


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
    rope = getattr(text_config, "rope_parameters", None) or {}
    longest = positions
    if positions is not None and rope.get("rope_type") == "dynamic":
        longest = int(positions * rope.get("factor", 1.0))  # beyond `positions`, `loading/forward/rotary.py` serves it
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if "chunked_attention" in kinds and chunk is not None:
        positions = longest = min(positions or chunk, chunk)  # within one chunk, chunked attention is full attention
    if config.max_model_len is None:
        if positions is None:
            raise ConfigError("the checkpoint has no max_position_embeddings; set max_model_len in model.json")
        return int(positions)
    if longest is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the checkpoint's {longest} positions; lower it"
        )
    return config.max_model_len


def eos_token_ids(model: nn.Module, text_config: Any) -> list[int]:
    """EOS ids of the generation configuration, else of the model's."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    if eos is None:
        return []
    return [int(eos)] if isinstance(eos, int) else [int(token) for token in eos]
