"""`multi_lora.json` beside a `model.json`, as vllm_backend reads it: names and folders of adapters.  No torch."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

from inflight.config import ConfigError

__all__ = ["FILE", "folder_of", "read_multi_lora"]

FILE = "multi_lora.json"


def read_multi_lora(model_dir: Path, required: bool, max_name_bytes: int) -> dict[str, Path]:
    """Name -> folder, in the order of the file.

    Args:
        model_dir: the version's folder.
        required: False: a missing file means that there are none.

    Raises:
        FileNotFoundError: there is no file, in vllm_backend's words.
        ConfigError: it is not an object of names and folders.
    """
    path = model_dir / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise FileNotFoundError(f"Triton backend cannot find {path}.") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(folder, str) and folder for folder in found.values()):
        raise ConfigError(f'{path}: must be an object of names and folders, such as {{"doll": "loras/doll"}}')
    for name in found:
        check_name(name, max_name_bytes, str(path))
    return {name: folder_of(model_dir, folder) for name, folder in found.items()}


def check_name(name: str, max_name_bytes: int, where: str) -> None:
    """Raises ConfigError: the name is empty, too long, not UTF-8, or has a comma, which separates names in metrics."""
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: the name {name!a} has an unpaired surrogate; write the whole character") from None
    if not 1 <= size <= max_name_bytes:
        raise ConfigError(f"{where}: a name of {size} bytes: 1 to {max_name_bytes} are allowed (max_name_bytes)")
    if any(letter == "," or unicodedata.category(letter) == "Cc" for letter in name):
        raise ConfigError(f"{where}: the name {name[:100]!a} has a comma or a control character; choose another name")


def folder_of(model_dir: Path, folder: str) -> Path:
    """A relative folder is one beside the file, if there is one; else, as in vllm_backend, one of the server's own."""
    beside = model_dir / folder
    return beside if beside.is_dir() else Path(folder).absolute()
