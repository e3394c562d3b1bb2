"""Loads a draft model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from inflight.config import STORED, ConfigError, EngineConfig
from inflight.loading.draft_length import agreed_length
from inflight.loading.load_errors import LoadError

__all__ = ["draft_config", "load_draft_runner"]


def load_draft_runner(config: EngineConfig, load: Callable[[EngineConfig], Any]) -> Any:
    """A runner with the draft model that `speculative_config` names; None if it names none.

    Args:
        config: the target's.
        load: makes a runner.

    Raises:
        LoadError, ConfigError: it cannot be loaded, or its vocabulary is not the target's.
    """
    try:
        own = draft_config(config)
        if own is None:
            return None
        runner = load(own)
        if runner.info.whole_prompts:
            raise ConfigError(f"model={own.model!r} is an encoder, which predicts no tokens; name a decoder")
        return runner
    except (LoadError, ConfigError) as error:
        raise type(error)(f"speculative_config: {error}") from error


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """The options that the draft model of `config` is loaded with; None if it names none.

    Raises:
        LoadError, ConfigError: its configuration cannot be read, or its vocabulary is not the target's.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.model is None:
        return None
    own = msgspec.structs.replace(
        config,
        model=speculative.model,
        revision=speculative.revision,
        max_model_len=None,
        quantization=None if config.quantization in STORED else config.quantization,  # of the target's files
        kv_cache_memory=speculative.kv_cache_memory,
        num_gpu_blocks_override=None,
        swap_space=0,
        kv_tiers=[],
        kv_listen=None,
        kv_events_config=None,
        preemption_mode="recompute",
        async_scheduling=False,
        itl_target_ms=None,
        speculative_config=None,
        enable_lora=False,  # adapters are the target's; it drafts as the checkpoint does
    )
    length = agreed_length(config, own, lambda: _length(config, own))
    return msgspec.structs.replace(own, max_model_len=length)


def _length(config: EngineConfig, own: EngineConfig) -> int:
    from inflight.loading.checkpoint.checkpoint_config import max_model_len, read_config  # transformers

    target, draft = (read_config(each).get_text_config(decoder=True) for each in (config, own))
    if target.vocab_size != draft.vocab_size:
        raise ConfigError(
            f"model={own.model!r} has a vocabulary of {draft.vocab_size} tokens, {config.model!r} one of "
            f"{target.vocab_size}; a draft model must have the same tokenizer"
        )
    return min(max_model_len(config, target), max_model_len(own, draft))
