"""A folder with the configuration and the tokenizer of a GGUF file, as Hugging Face checkpoints have them.

Made once for each content of a file, in the user's cache, for all processes that read them.  The weights stay where
they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from inflight.gguf.architectures import config_of, tensor_names
from inflight.gguf.header import GgufError, GgufHeader, read_header
from inflight.gguf.tokenizer import make_tokenizer, special_tokens, stop_token_ids

__all__ = ["NO_TOKENIZER", "unpacked"]

NO_TOKENIZER = "no_tokenizer.txt"  # instead of a tokenizer: why there is none
_MAX_FOLDERS = 16
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_TEMPLATE = "tokenizer.chat_template"


def unpacked(file: Path) -> Path:
    """The folder; made if the file has changed since, or if what makes it has.

    Raises:
        GgufError: the file cannot be served; or no folder can be written.
    """
    file = file.resolve()
    try:
        before = _identity(file)
        home = _home()
        folder = home / hashlib.sha256(f"{_code()} {before}".encode()).hexdigest()[:32]
        if not (folder / "config.json").is_file():
            contents = _contents(read_header(file))
            if _identity(file) != before:
                raise GgufError("it was written to while it was read; try again when it is complete")
            _write(folder, contents)
            _remove_oldest(home, folder)
        with contextlib.suppress(OSError):
            os.utime(folder)
    except OSError as error:
        raise GgufError(
            f"its configuration cannot be unpacked: {error}; set XDG_CACHE_HOME to a folder with room"
        ) from None
    return folder


def _identity(file: Path) -> str:
    found = file.stat()
    return f"{file} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


@cache
def _code() -> str:
    """Of the modules that make a folder."""
    digest = hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(module.read_bytes())
    return digest.hexdigest()


def _home() -> Path:
    """A folder that only this user can read and write.

    Raises:
        OSError: there is none.
    """
    try:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        return _private(cache_home / "inflight" / "gguf")
    except (OSError, RuntimeError):  # users without a home
        return _private(Path(tempfile.gettempdir(), f"inflight-{os.getuid()}"))


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} does not belong to this user alone")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written")
    return folder


def _contents(header: GgufHeader) -> dict[str, str]:
    """Names and texts of the files."""
    metadata = header.metadata
    config = config_of(header)
    tensor_names(header)  # refuses tensors without a place before anything is loaded
    stops = [token for token in stop_token_ids(metadata) if token < config["vocab_size"]]
    ids = {"eos_token_id": stops or None, "bos_token_id": _token_id(metadata, "bos", config["vocab_size"])}
    files = {
        "config.json": json.dumps({**config, **ids}, indent=1),
        "generation_config.json": json.dumps({**ids, **_sampling(metadata)}, indent=1),
    }
    try:
        return files | _tokenizer_files(metadata, config["max_position_embeddings"])
    except GgufError as error:
        return files | {NO_TOKENIZER: str(error)}


def _token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < size else None


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, name in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found[name] = value
    return found


def _tokenizer_files(metadata: Mapping[str, Any], length: int) -> dict[str, str]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
        **special_tokens(metadata),
    }
    files = {"tokenizer.json": make_tokenizer(metadata).to_str(), "tokenizer_config.json": json.dumps(settings)}
    for name, key in (
        ("chat_template.jinja", _TEMPLATE),
        ("additional_chat_templates/tool_use.jinja", f"{_TEMPLATE}.tool_use"),
    ):
        if isinstance(template := metadata.get(key), str):
            files[name] = template
    return files


def _write(folder: Path, contents: Mapping[str, str]) -> None:
    """All or nothing; another process may write the same."""
    made = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    try:
        for name, text in contents.items():
            path = made / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process has just made it
                shutil.rmtree(folder)
                made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_oldest(home: Path, kept: Path) -> None:
    """Folders that were used least recently, beyond a number; and parts that a killed process has left."""
    for folder in sorted(_by_age(home))[:-_MAX_FOLDERS]:
        if folder[1] != kept:
            shutil.rmtree(folder[1], ignore_errors=True)


def _by_age(home: Path) -> Iterator[tuple[float, Path]]:
    for folder in home.iterdir():
        with contextlib.suppress(OSError):
            yield folder.stat().st_mtime, folder
