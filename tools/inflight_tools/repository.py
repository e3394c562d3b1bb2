"""Writes a model repository entry: `<folder>/<name>/config.pbtxt` and `<name>/1/model.json`; reads other entries."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from inflight.config import ConfigError, EngineConfig
from inflight.gguf.hub_names import hub_name

__all__ = [
    "CONFIG_PBTXT",
    "check_repository",
    "default_name",
    "longest_drain",
    "lora_modules",
    "parse_setting",
    "read_settings",
    "resolve_model",
    "write_entry",
]

_GGUF = ".gguf"
CONFIG_PBTXT = """\
# The backend completes inputs, outputs and the transaction policy when the model is loaded.
backend: "inflight"
instance_group [ { kind: KIND_MODEL, count: 1 } ]
parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }
"""


def default_name(model: str) -> str:
    """A Triton model name for a hub id, a directory or a GGUF file: its last part, limited to `[A-Za-z0-9_.-]`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(model).name.removesuffix(_GGUF)).strip("-.") or "model"


def parse_setting(text: str) -> tuple[str, Any]:
    """Key and value of `--set KEY=VALUE`; the value is JSON if it parses as JSON, otherwise a string.

    Raises:
        ConfigError: no key, or no `=`.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text!r}: expected KEY=VALUE, such as --set max_queue_size=64")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def lora_modules(given: Iterable[str]) -> dict[str, str]:
    """Names and absolute folders of adapters, from `NAME=FOLDER`.

    Raises:
        ConfigError: no name, no folder, a name twice, or no adapter in the folder.
    """
    found: dict[str, str] = {}
    for text in given:
        name, _, folder = text.partition("=")
        path = Path(folder).expanduser()
        if not name or not folder:
            raise ConfigError(f"--lora-module {text!r}: expected NAME=FOLDER, such as --lora-module sql=./sql-lora")
        if name in found:
            raise ConfigError(f"--lora-module {text!r}: the name came before")
        if not (path / "adapter_config.json").is_file():
            raise ConfigError(f"--lora-module {text!r}: no adapter_config.json in {path}; give a folder of PEFT's")
        found[name] = str(path.resolve())
    return found


def resolve_model(model: str) -> str:
    """The absolute path of a checkpoint directory or a GGUF file, or a hub id or the name of a GGUF file there.

    Raises:
        ConfigError: neither existing nor a possible hub id, or a directory without a checkpoint.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            file = min(path.glob(f"*{_GGUF}"), default=None)
            other = "" if file is None else f", or the file itself: {file}"
            raise ConfigError(
                f"model={model!r}: no config.json in that directory; give a Hugging Face checkpoint{other}"
            )
        return str(path.resolve())
    if path.is_file():
        return str(path.resolve())
    if hub_name(model) is not None:
        return model
    if model.endswith(_GGUF):
        raise ConfigError(f"model={model!r}: no such file")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", model):
        raise ConfigError(
            f"model={model!r}: no such directory or file, and not a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    return model


def check_repository(folder: Path) -> None:
    """Raise ConfigError if Triton would find no model in `folder`."""
    if not folder.is_dir():
        raise ConfigError(f"--model-repository {folder}: no such directory")
    if not any(path.is_dir() and any(path.iterdir()) for path in folder.iterdir()):
        raise ConfigError(
            f"--model-repository {folder}: no model there; `inflight init {folder} --model HUB_ID_OR_FOLDER` writes one"
        )


def write_entry(folder: Path, name: str, config: EngineConfig, modules: Mapping[str, str] | None = None) -> Path:
    """Write an entry that Triton loads as `name`; `model.json` lists what differs from the defaults.

    With `enable_lora`, `multi_lora.json` has `modules`: names and folders of adapters.

    A checkpoint or tokenizer inside `folder` is written relative to `model.json`, so the repository can be
    moved or mounted elsewhere; any other directory or file is written as an absolute path.

    Returns:
        The folder of the entry.

    Raises:
        ConfigError: `name` is not a valid model name, the entry exists, or it cannot be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ConfigError(f"name={name!r}: a model name starts with a letter or digit, then letters, digits, _ . -")
    entry = folder / name
    if entry.exists():
        raise ConfigError(f"{entry} already exists; choose another name or remove it")
    defaults = msgspec.to_builtins(EngineConfig(model=config.model))
    values = {
        key: value for key, value in msgspec.to_builtins(config).items() if key == "model" or value != defaults[key]
    }
    for key in ("model", "tokenizer"):
        # Beside an entry, a file is looked for by this ending only.
        path = Path(values.get(key) or "")
        if key in values and (path.is_dir() or (path.suffix == _GGUF and path.is_file())):
            values[key] = _portable(path, folder, entry / "1")
    try:
        (entry / "1").mkdir(parents=True)
        (entry / "config.pbtxt").write_text(CONFIG_PBTXT, encoding="utf-8")
        (entry / "1" / "model.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if config.enable_lora:
            text = json.dumps(dict(modules or {}), indent=2) + "\n"
            (entry / "1" / "multi_lora.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {entry}: {error.strerror}") from None
    return entry


def _portable(path: Path, repository: Path, base: Path) -> str:
    """`path` relative to `base` if it is inside `repository`, otherwise absolute."""
    path = path.resolve()
    return os.path.relpath(path, base.resolve()) if path.is_relative_to(repository.resolve()) else str(path)


def read_settings(repositories: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The contents of each `model.json` of the repositories; an unreadable file is left out."""
    for repository in repositories:
        for path in repository.glob("*/*/model.json"):
            try:
                settings = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError):
                continue  # the model's own load says what is wrong with the file
            if isinstance(settings, dict):
                yield settings


def longest_drain(repositories: Iterable[Path]) -> float:
    """The longest `drain_timeout` of the repositories' models, in seconds; its default if no `model.json` has a valid
    one."""
    found = []
    default = EngineConfig(model="any").drain_timeout
    for settings in read_settings(repositories):
        with contextlib.suppress(ConfigError):  # its load will say so
            values = {"model": "any", "drain_timeout": settings.get("drain_timeout", default)}
            found.append(EngineConfig.from_dict(values).drain_timeout)
    return max(found, default=default)
