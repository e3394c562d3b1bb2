"""A checkpoint's sampling defaults, from generation_config.json.  No torch, no Triton.

Reads the same keys as vLLM's `generation_config`; `do_sample` and other keys of transformers have no effect.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inflight.config import ConfigError, EngineConfig
from inflight.hub import CheckpointFileError, checkpoint_file

__all__ = ["generation_defaults"]

_FILE = "generation_config.json"
# Key of the file -> sampling key, type, minimum, maximum.
_KEYS: dict[str, tuple[str, type, float, float]] = {
    "temperature": ("temperature", float, 0.0, 100.0),
    "top_k": ("top_k", int, -1, 2**31 - 1),
    "top_p": ("top_p", float, 1e-9, 1.0),
    "min_p": ("min_p", float, 0.0, 1.0),
    "repetition_penalty": ("repetition_penalty", float, 1e-9, 1000.0),
    "max_new_tokens": ("max_tokens", int, 1, 2**31 - 1),
}


def generation_defaults(config: EngineConfig) -> dict[str, Any]:
    """Sampling keys and values from the file that `config.generation_config` names; "auto" or None: the checkpoint's.

    Returns:
        {} for "vllm", and for a checkpoint without the file.

    Raises:
        ConfigError: a folder without the file, or a file that cannot be used.
    """
    where = config.generation_config or "auto"
    if where == "vllm":
        return {}
    source, revision = (config.model, config.revision) if where == "auto" else (where, None)
    try:
        path = checkpoint_file(source, _FILE, revision)
    except CheckpointFileError as error:
        raise ConfigError(f"generation_config={where!r}: {error}") from None
    if path is None:
        if where == "auto":
            return {}
        raise ConfigError(f'generation_config={where!r} has no {_FILE}; set it to "auto", "vllm" or a folder with one')
    return _defaults_of(path)


def _defaults_of(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(values).__name__}")
    found = {}
    for name, (key, kind, low, high) in _KEYS.items():
        value = values.get(name)
        if value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high or kind(value) != value:
            raise ConfigError(
                f"{path}: {name}={value!r} must be {'a whole number' if kind is int else 'a number'} from {low:g} to "
                f'{high:g}; set "generation_config": "vllm" to ignore the file'
            )
        found[key] = kind(value)
    return found
