"""Reads a `model.json`.  No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from inflight.config import ConfigError, EngineConfig
from inflight.vllm_options import BACKEND, STREAM_INTERVAL

__all__ = ["read_model_json"]


def read_model_json(path: str | Path, backend: str = "") -> EngineConfig:
    """Read a `model.json`, of an entry that names `backend` in `config.pbtxt`.

    A relative `model`, `tokenizer`, `generation_config` or draft model that is a directory or a GGUF file next to
    the file means that one, so a repository entry can contain its checkpoint.

    Raises:
        ConfigError: no such file, not JSON, or rejected by `EngineConfig.from_dict`.
    """
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f'{path}: no such file; create it with {{"model": "<checkpoint or hub id>"}}') from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if backend == BACKEND and isinstance(values, dict):
        values = {**STREAM_INTERVAL, **values}
    config = EngineConfig.from_dict(values, source=str(path))
    beside: dict[str, Any] = {
        key: str((path.parent / value).resolve())
        for key in ("model", "tokenizer", "generation_config")
        if (value := getattr(config, key)) and _is_checkpoint(path.parent / value)
    }
    speculative = config.speculative_config
    if speculative is not None and speculative.model and _is_checkpoint(path.parent / speculative.model):
        draft = str((path.parent / speculative.model).resolve())
        beside["speculative_config"] = msgspec.structs.replace(speculative, model=draft)
    return msgspec.structs.replace(config, **beside)


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() or (path.suffix == ".gguf" and path.is_file())
