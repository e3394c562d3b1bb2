"""Grammars over a checkpoint's own vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight.config import EngineConfig
from inflight.grammars.base import Grammars
from inflight.grammars.guidance import GuidanceGrammars
from inflight.hub import CheckpointFileError, checkpoint_file

__all__ = ["checkpoint_grammars"]


def checkpoint_grammars(config: EngineConfig, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
    """The tokenizer is read when the first grammar, or a warm-up, asks for it."""
    return GuidanceGrammars(lambda: _tokenizer_json(config), vocab_size, eos_token_ids)


def _tokenizer_json(config: EngineConfig) -> str:
    """The tokenizer as the library `tokenizers` serialises it.

    Raises:
        ValueError: there is none that it reads.
    """
    source, revision = config.tokenizer_source, config.tokenizer_source_revision
    try:
        path = checkpoint_file(source, "tokenizer.json", revision)
    except CheckpointFileError as error:
        raise ValueError(f"structured output needs the tokenizer: {error}") from None
    if path is not None:
        from tokenizers import Tokenizer

        tokenizer: Any = Tokenizer.from_file(str(path))
    else:
        from transformers import AutoTokenizer

        try:
            slow = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError, ImportError):
            slow = None
        tokenizer = getattr(slow, "backend_tokenizer", None)
    if tokenizer is None:
        raise ValueError(
            f"structured output needs a tokenizer that the library tokenizers reads, and {source} has none"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.to_str()
