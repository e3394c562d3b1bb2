"""Loads a draft model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from inflight.config import STORED, ConfigError, EngineConfig
from inflight.loading.load_errors import LoadError
from inflight.speculative import SpeculativeConfig

__all__ = ["load_draft_runner"]


def load_draft_runner(config: EngineConfig, load: Callable[[EngineConfig], Any]) -> Any:
    """A runner with the draft model that `speculative_config` names; None if it names none.

    Args:
        config: the target's.
        load: makes a runner.

    Raises:
        LoadError, ConfigError: it cannot be loaded, or its vocabulary is not the target's.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.model is None:
        return None
    try:
        runner = load(_own_config(config, speculative))
        if runner.info.whole_prompts:
            raise ConfigError(f"model={speculative.model!r} is an encoder, which predicts no tokens; name a decoder")
        return runner
    except (LoadError, ConfigError) as error:
        raise type(error)(f"speculative_config: {error}") from error


def _own_config(config: EngineConfig, speculative: SpeculativeConfig) -> EngineConfig:
    from inflight.loading.checkpoint.checkpoint_config import max_model_len, read_config  # transformers

    assert speculative.model is not None
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
        preemption_mode="recompute",
        async_scheduling=False,
        itl_target_ms=None,
        speculative_config=None,
        enable_lora=False,  # adapters are the target's; it drafts as the checkpoint does
    )
    target, draft = (read_config(each).get_text_config(decoder=True) for each in (config, own))
    if target.vocab_size != draft.vocab_size:
        raise ConfigError(
            f"model={speculative.model!r} has a vocabulary of {draft.vocab_size} tokens, {config.model!r} one of "
            f"{target.vocab_size}; a draft model must have the same tokenizer"
        )
    length = min(max_model_len(config, target), max_model_len(own, draft))
    return msgspec.structs.replace(own, max_model_len=length)
