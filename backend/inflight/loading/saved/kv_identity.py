"""The namespace of KV that outlives its engine: what decides the bytes of a block, beside tokens, tenant and salts.

Content, never names: two checkpoints under one name, or one under two names and on two machines, are told apart and
brought together by what they are.  Covered are

    the checkpoint    config.json and the like, its code, and every weight (XXH3-128, remembered: `identity.py`)
    the options       that change a number in the KV
    the program       Inflight's code and kernels, torch, transformers; the CPU's instruction set, or the GPU's compute
                      capability with the versions of CUDA and Triton
    the pool          dtype and shape of a block in each layer, and the scales of fp8

Not covered are thread counts, limits of a batch and max_model_len, which change no bit.  The rotary frequencies that a
request chooses are in its salts.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from inflight.attention.base import KVCache
from inflight.config import EngineConfig
from inflight.hub import checkpoint_file, gguf_file
from inflight.kernels.cpu import build
from inflight.kernels.cpu.library import instruction_set, unavailable
from inflight.loading.load_errors import CannotKeep, LoadError
from inflight.loading.saved.cache_folder import CacheFolder, cache_folder
from inflight.loading.saved.identity import digest_of, installed, program_key

__all__ = ["KV_DECISIVE", "kv_namespace"]

_FORMAT = 1
KV_DECISIVE = (
    *("block_size", "kernel_config", "kv_cache_dtype", "load_format", "native_forward", "quantization"),
    "trust_remote_code",
)
_PACKAGE = Path(__file__).parents[2]
_MORE_SOURCES = ("adapters", "runner")  # beside those of kept weights: scales of adapters, positions, slots
_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".safetensors")
_CONFIGS = ("adapter_config.json", "config.json", "quant_config.json", "quantize_config.json")


def kv_namespace(config: EngineConfig, attention_backend: str, dtype: str, caches: Sequence[KVCache]) -> bytes:
    """16 bytes.

    Args:
        attention_backend, dtype: of the loaded model.
        caches: of its layers, allocated.

    Raises:
        LoadError: what the checkpoint is cannot be told.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kv")
    options = {name: msgspec.to_builtins(getattr(config, name)) for name in KV_DECISIVE}
    facts = [_FORMAT, options, attention_backend, dtype, sys.byteorder, [_layout(cache) for cache in caches]]
    digest.update(msgspec.json.encode([*facts, _program(caches[0].key.device)], order="deterministic"))
    try:
        for path in _files(config):
            digest.update(msgspec.json.encode([path.name, digest_of(path, _cache()).hex()]))
    except OSError as error:
        raise LoadError(f"kv_tiers: the files of {config.model!r} cannot be read: {error}") from None
    for cache in caches:
        for scale in (cache.key_scale, cache.value_scale):
            if scale is not None:
                digest.update(scale.detach().cpu().float().numpy().tobytes())
    return digest.digest()


def _layout(cache: KVCache) -> list[Any]:
    return [[str(part.dtype), list(part.shape[1:]), list(part.stride())] for part in (cache.key, cache.value)]


def _program(device: torch.device) -> str:
    """The code that computes KV; also where the compiled kernels are missing."""
    more: tuple[str, ...] = _MORE_SOURCES
    if device.type == "cuda":
        platform = [*torch.cuda.get_device_capability(device), torch.version.cuda, installed("triton")]
        key, more = program_key(f"cuda {platform}", Path(__file__), str(torch.__version__)), (*more, "kernels/gpu")
    elif unavailable() is None:
        key = program_key(instruction_set(), build.LIBRARY, str(torch.__version__))
    else:
        key = program_key(torch.backends.cpu.get_cpu_capability(), Path(__file__), str(torch.__version__))
    sources = sorted(path for name in more for path in (_PACKAGE / name).rglob("*.py"))
    return key + hashlib.blake2b(b"".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()


def _files(config: EngineConfig) -> Iterator[Path]:
    """The files of the checkpoint that decide what it computes."""
    file = gguf_file(config.model, config.revision)
    if file is not None:
        yield file
        return
    found = checkpoint_file(config.model, "config.json", config.revision)
    if found is None:
        raise LoadError(f"kv_tiers: {config.model!r} has no config.json, so its KV cannot be identified")
    if config.trust_remote_code:
        _expect_own_code(found)
    folder = found.parent
    names = {path.name for path in folder.iterdir() if path.suffix in (*_WEIGHTS, ".py") or path.name in _CONFIGS}
    for index in folder.glob("*.index.json"):
        names |= {index.name, *_shards(index)}
    yield from (folder / name for name in sorted(names) if (folder / name).is_file())


def _expect_own_code(config_json: Path) -> None:
    """
    Raises:
        LoadError: the checkpoint runs code of another repository, which can change.
    """
    values = _read(config_json)
    auto_map = values.get("auto_map") if isinstance(values, dict) else None
    if "--" in json.dumps(auto_map):
        raise LoadError(
            f"kv_tiers: the checkpoint runs code of another repository ({auto_map}), which is not part of its files; "
            "copy the code into its folder, or leave kv_tiers out"
        )


def _shards(index: Path) -> set[str]:
    values = _read(index)
    shards = values.get("weight_map") if isinstance(values, dict) else None
    return {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None  # its bytes count all the same


def _cache() -> CacheFolder | None:
    try:
        return cache_folder()
    except CannotKeep:
        return None
