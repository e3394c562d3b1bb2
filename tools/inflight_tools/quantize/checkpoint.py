"""The finished checkpoint: config.json, weights in as few files as others write, and what belongs to the tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from inflight_tools.quantize.compressed import quantization_config
from inflight_tools.quantize.decoder_walk import Scheme
from inflight_tools.quantize.source import HEAD, Source
from inflight_tools.quantize.work_folder import save_tensors, write_whole

__all__ = ["rest_of", "write_checkpoint"]

_LARGEST = 2**30  # bytes of a file of weights
_COPIED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "NOTICE*")
_OWN = ("config.json", "*.safetensors.index.json", "pytorch_model.bin.index.json", "recipe.*")


def rest_of(source: Source, parts: Sequence[Path]) -> list[str]:
    """Names of tensors that are copied as they are: all of the model's that are in no part."""
    coded = {name for part in parts for name in _names(part)}
    tied = set(source.model.all_tied_weights_keys)
    layers = {name.removesuffix(".weight_packed") for name in coded if name.endswith(".weight_packed")}
    wanted = [name for name, _ in source.model.named_parameters() if name not in tied]
    return [name for name in wanted if name.removesuffix(".weight") not in layers]


def write_checkpoint(source: Source, scheme: Scheme, parts: Sequence[Path], folder: Path) -> list[str]:
    """Write all files of the checkpoint; returns the linear layers of the decoder that stay as they are.

    Raises:
        OSError: a file cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    _write_weights(source, parts, folder)
    coded = {name for part in parts for name in _names(part)}
    ignored = [name for name in linear_layers(source) if f"{name}.weight_packed" not in coded]
    config = dict(source.config)
    if f"{HEAD}.weight_packed" in coded:
        config["tie_word_embeddings"] = False
    config["quantization_config"] = quantization_config(scheme, ignored)
    text = json.dumps(config, indent=2) + "\n"
    write_whole(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))
    for path in sorted(source.folder.iterdir()):
        if path.is_file() and _matches(path.name, _COPIED) and not _matches(path.name, _OWN):
            write_whole(folder / path.name, lambda new, path=path: shutil.copyfile(path, new))  # type: ignore[misc]
    return [name for name in ignored if name != HEAD]


def linear_layers(source: Source) -> list[str]:
    """Names of the decoder's linear layers, and the head's."""
    return [name for name, module in source.model.named_modules() if isinstance(module, nn.Linear)]


def _write_weights(source: Source, parts: Sequence[Path], folder: Path) -> None:
    """In one file, or in several with an index."""
    sizes = [(name, tensor.nbytes) for name, tensor in _tensors(source, parts)]
    shards: list[list[str]] = []
    filled = _LARGEST
    for name, size in sizes:
        if filled + size > _LARGEST:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        save_tensors(folder / "model.safetensors", dict(_tensors(source, parts)))
        return
    weight_map: dict[str, str] = {}
    tensors = _tensors(source, parts)
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_tensors(folder / file, dict(next(tensors) for _ in names))
        weight_map |= dict.fromkeys(names, file)
    index: dict[str, Any] = {"metadata": {"total_size": sum(size for _, size in sizes)}, "weight_map": weight_map}
    text = json.dumps(index, indent=2) + "\n"
    write_whole(folder / "model.safetensors.index.json", lambda path: path.write_text(text))


def _tensors(source: Source, parts: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """All tensors, one at a time; pages of files."""
    for name in rest_of(source, parts):
        yield name, source.read(name)
    for part in parts:
        with safe_open(part, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def _names(part: Path) -> list[str]:
    with safe_open(part, framework="pt") as tensors:
        return list(tensors.keys())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
