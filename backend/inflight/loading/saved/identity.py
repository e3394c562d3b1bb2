"""The name of a file of kept weights: digests of content, never names.  No torch.

Two keys.  That of the checkpoint covers the bytes of config.json, generation_config.json, modules.json and every
weight, or those of a GGUF file, and the options that decide what is made of them.  That of the program covers
Inflight's code and kernels, the versions of torch and transformers, and the CPU's instruction set.  Neither covers
thread counts or limits of a batch: they change no bit.

Weights are read whole, by XXH3 at 20 GB/s; a load reads them in any case.  Their digests are remembered by device,
inode, size, mtime and ctime, so that the next start reads none.  A tool can set an mtime, but not a ctime.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from inflight.config import EngineConfig
from inflight.hub import CheckpointFileError, checkpoint_file, gguf_file
from inflight.loading.load_errors import CannotKeep
from inflight.loading.saved.cache_folder import CacheFolder

__all__ = ["DECISIVE", "FORMAT", "checkpoint_key", "digest_of", "installed", "program_key"]

FORMAT = 3  # of the keys and of the file
DECISIVE = ("attention_backend", "block_size", "dtype", "head_bits", "kv_cache_dtype", "max_model_len", "quantization")

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_CONFIGS = ("config.json", "generation_config.json", "modules.json", _INDEX)  # modules.json: see `is_headless`
_NAMES_OF_FILES = ("configuration_files", "transformers_weights")  # in a config.json, of what is read instead
_CHUNK = 2**20  # stays in a core's cache between the read and the digest
_SETTLED_NS = 3 * 10**9  # a younger file can change once more within the resolution of its times
_PACKAGE = Path(__file__).parents[2]
_SOURCES = ("attention", "device", "gguf", "kernels/cpu", "loading", "ops")


class _Remembered(msgspec.Struct):
    """The digest of a file that had these times and sizes."""

    stat: tuple[int, int, int, int, int]
    digest: bytes


def checkpoint_key(config: EngineConfig, cache: CacheFolder) -> str:
    """Of the checkpoint and the options: 32 hexadecimal digits.

    Raises:
        CannotKeep: it is not one that is kept; says why.
    """
    _expect_checked(config)
    options = {name: getattr(config, name) for name in DECISIVE}
    digest = hashlib.blake2b(msgspec.json.encode([FORMAT, options], order="deterministic"), digest_size=16)
    try:
        file = gguf_file(config.model, config.revision)
        parts = _of_folder(config, cache) if file is None else [["gguf", digest_of(file, cache)]]
    except CheckpointFileError as error:
        raise CannotKeep(str(error)) from None
    except OSError as error:
        raise CannotKeep(f"{config.model!r} cannot be read: {error}") from None
    for part in parts:
        digest.update(msgspec.json.encode(part))
    return digest.hexdigest()


def _of_folder(config: EngineConfig, cache: CacheFolder) -> list[list[Any]]:
    """Name and digest of each file that says what is loaded.  Raises CannotKeep, CheckpointFileError, OSError."""
    found = checkpoint_file(config.model, "config.json", config.revision)
    if found is None:
        raise CannotKeep(f"{config.model!r} has no config.json")
    folder = found.parent
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise CannotKeep(f"{config.model!r} has no safetensors files")
    _expect_all_beside(folder / _INDEX, {path.name for path in weights})
    if (folder / "adapter_config.json").exists():
        raise CannotKeep(f"{config.model!r} has an adapter")
    _expect_own_names(found)
    parts: list[list[Any]] = []
    for path in (folder / name for name in _CONFIGS):
        content = path.read_bytes() if path.is_file() else b""
        parts.append([path.name, hashlib.blake2b(content).hexdigest()])
    return parts + [[path.name, digest_of(path, cache)] for path in weights]


def program_key(instruction_set: str, library: Path, torch_version: str) -> str:
    """Of the code that makes the weights' panels and reads them: 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    sources = sorted(path for name in _SOURCES for path in (_PACKAGE / name).rglob("*.py"))
    digest.update(msgspec.json.encode([FORMAT, instruction_set, torch_version, installed("transformers")]))
    for path in (library, *sources):
        digest.update(xxhash.xxh3_128_digest(path.read_bytes()))
    return digest.hexdigest()


def _expect_checked(config: EngineConfig) -> None:
    """
    Raises:
        CannotKeep: an option asks for something else than the checked, native forward pass of a checkpoint's weights.
    """
    if config.device == "cuda":
        raise CannotKeep("the device is no CPU")
    if config.trust_remote_code:
        raise CannotKeep("trust_remote_code runs the checkpoint's own code at each load")
    if config.load_format != "auto":
        raise CannotKeep("its weights are not read from files")
    if not config.check_on_load or not config.native_forward or config.kernel_config.switches:
        raise CannotKeep("check_on_load, native_forward or kernel_config are not at their defaults")


def _expect_own_names(config_json: Path) -> None:
    """
    Raises:
        CannotKeep: it names other files, which are read instead.
    """
    try:
        values: Any = json.loads(config_json.read_bytes())
    except (OSError, ValueError) as error:
        raise CannotKeep(f"{config_json} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise CannotKeep(f"{config_json} is no object")
    if not values.keys().isdisjoint(_NAMES_OF_FILES):
        raise CannotKeep(f"its config.json has {' or '.join(_NAMES_OF_FILES)}")


def _expect_all_beside(index: Path, names: set[str]) -> None:
    """
    Raises:
        CannotKeep: weights lie elsewhere than in the files of these `names`, which are in the index's folder.
    """
    if _WHOLE in names or not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotKeep(f"{index} cannot be read: {error}") from None
    if not shards <= names:
        raise CannotKeep(f"{index.name} names files that are not beside it")


def digest_of(path: Path, cache: CacheFolder | None) -> bytes:
    """XXH3-128 of a file's bytes, perhaps remembered in `cache`."""
    real = path.resolve()
    note = f"{hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest()}.digest"
    with real.open("rb", buffering=0) as file:
        stat = _stat(file.fileno())
        with contextlib.suppress(msgspec.MsgspecError, OSError):
            content = b"" if cache is None else cache.read_note(note)
            remembered = msgspec.msgpack.decode(content, type=_Remembered)
            if remembered.stat == stat:
                return remembered.digest
        begun = time.time_ns()
        state, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            state.update(buffer[:count])
        settled = max(stat[3:]) + _SETTLED_NS < begun
        if cache is not None and settled and _stat(file.fileno()) == stat:
            cache.write_note(note, msgspec.msgpack.encode(_Remembered(stat, state.digest())))
        return state.digest()


def _stat(descriptor: int) -> tuple[int, int, int, int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def installed(package: str) -> str:
    """The version of a package, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
