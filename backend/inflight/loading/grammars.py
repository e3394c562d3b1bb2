"""Grammars over a checkpoint's own vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.config import EngineConfig
from inflight.grammars.base import Grammars
from inflight.grammars.guidance import GuidanceGrammars
from inflight.hub import CheckpointFileError, checkpoint_file, snapshot

__all__ = ["checkpoint_grammars", "share_grammars"]

_Key = tuple[str, str | None, int, tuple[int, ...]]  # source, revision, size of the vocabulary, EOS ids
_State = tuple[int, int, int, int, int]
_shared: dict[_Key, tuple[Path, _State, GuidanceGrammars]] = {}  # read in this process's parent; of which file


def checkpoint_grammars(config: EngineConfig, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
    """The tokenizer is read when the first grammar or a warm-up asks for it, unless the parent process has done it."""
    shared = _shared.get(_key(config, vocab_size, eos_token_ids))
    if shared is not None and shared[0] == _local_file(config) and shared[1] == _state(shared[0]):
        return shared[2]
    return GuidanceGrammars(lambda: _tokenizer_json(config), vocab_size, eos_token_ids)


def share_grammars(config: EngineConfig, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Read the tokenizer for the forks of this process, if its file is on this machine.  Leaves no thread.

    Raises:
        ValueError: there can be no grammars; says why.
    """
    path = _local_file(config)
    if path is None:
        return
    state = _state(path)
    grammars = GuidanceGrammars(lambda: path.read_text(encoding="utf-8"), vocab_size, eos_token_ids)
    grammars.load()
    if state is not None and state == _state(path):
        _shared[_key(config, vocab_size, eos_token_ids)] = path, state, grammars


def _key(config: EngineConfig, vocab_size: int, eos_token_ids: Sequence[int]) -> _Key:
    return config.tokenizer_source, config.tokenizer_source_revision, vocab_size, tuple(eos_token_ids)


def _state(path: Path) -> _State | None:
    """Of a file; None if there is none any more."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _local_file(config: EngineConfig) -> Path | None:
    """The same as `_tokenizer_file` while the hub, which is not asked, has nothing newer; None if it is not here.

    A GGUF file that is replaced, or another snapshot of a repository, has another one.
    """
    try:
        folder = snapshot(config.tokenizer_source, config.tokenizer_source_revision)
    except CheckpointFileError:
        return None
    path = None if folder is None else folder / "tokenizer.json"
    return path if path is not None and path.is_file() else None


def _tokenizer_file(config: EngineConfig) -> Path | None:
    """The file of the library `tokenizers`, if there is one."""
    try:
        return checkpoint_file(config.tokenizer_source, "tokenizer.json", config.tokenizer_source_revision)
    except CheckpointFileError as error:
        raise ValueError(f"structured output needs the tokenizer: {error}") from None


def _tokenizer_json(config: EngineConfig) -> str:
    """The tokenizer as the library `tokenizers` reads it.

    Raises:
        ValueError: there is none that it reads.
    """
    path = _tokenizer_file(config)
    if path is not None:
        return path.read_text(encoding="utf-8")
    from transformers import AutoTokenizer

    source, revision = config.tokenizer_source, config.tokenizer_source_revision
    try:
        slow = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, ImportError):
        slow = None
    tokenizer: Any = getattr(slow, "backend_tokenizer", None)
    if tokenizer is None:
        raise ValueError(
            f"structured output needs a tokenizer that the library tokenizers reads, and {source} has none"
        )
    return tokenizer.to_str()
