"""Write a model repository entry: `<folder>/<name>/config.pbtxt` and `<name>/1/model.json`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from inflight.config import ConfigError, EngineConfig

__all__ = ["CONFIG_PBTXT", "default_name", "parse_setting", "resolve_model", "write_entry"]

CONFIG_PBTXT = """\
# Inputs, outputs and the transaction policy are completed by the backend at load.
backend: "inflight"
instance_group [ { kind: KIND_MODEL, count: 1 } ]
parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }
"""


def default_name(model: str) -> str:
    """A Triton model name for a hub id or a directory: its last part, of `[A-Za-z0-9_.-]`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(model).name).strip("-.") or "model"


def parse_setting(text: str) -> tuple[str, Any]:
    """Key and value of `--set KEY=VALUE`; a value is JSON where it parses as JSON, else text.

    Raises:
        ConfigError: there is no key, or no `=`.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text!r}: expected KEY=VALUE, such as --set max_queue_size=64")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def resolve_model(model: str) -> str:
    """The checkpoint as `model.json` should name it: an existing directory becomes absolute.

    Raises:
        ConfigError: it is written like a path, or can be no hub id, and no such directory exists.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model={model!r}: no config.json in that directory; give a Hugging Face checkpoint")
        return str(path.resolve())
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", model):
        raise ConfigError(f"model={model!r}: no such directory, and not a hub id such as Qwen/Qwen2.5-0.5B-Instruct")
    return model


def write_entry(folder: Path, name: str, config: EngineConfig) -> Path:
    """Write an entry that Triton loads as `name`; `model.json` holds what differs from the defaults.

    Returns:
        The entry's folder.

    Raises:
        ConfigError: `name` cannot be a model name, the entry exists, or the folder cannot be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ConfigError(f"name={name!r}: a model name starts with a letter or digit, then letters, digits, _ . -")
    entry = folder / name
    if entry.exists():
        raise ConfigError(f"{entry} exists already; choose another name or remove it")
    defaults = msgspec.to_builtins(EngineConfig(model=config.model))
    values = {
        key: value for key, value in msgspec.to_builtins(config).items() if key == "model" or value != defaults[key]
    }
    try:
        (entry / "1").mkdir(parents=True)
        (entry / "config.pbtxt").write_text(CONFIG_PBTXT, encoding="utf-8")
        (entry / "1" / "model.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {entry}: {error.strerror}") from None
    return entry
