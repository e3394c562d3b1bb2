"""Single tensors of a checkpoint, for what transformers does not load."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, cat

from inflight.hub import snapshot
from inflight.loading.quantization.packing import Header

__all__ = ["TensorFiles", "headers_of", "weight_files"]


class TensorFiles:
    """The safetensors files of a checkpoint: a directory, or a hub id whose files have been downloaded.

    Attributes:
        dtypes: of all tensors, by name, as the files' headers spell them: "BF16", "F8_E4M3".
    """

    def __init__(self, model: str, revision: str | None = None) -> None:
        folder = snapshot(model, revision)
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        for file in [] if folder is None else weight_files(folder):
            for name, header in headers_of(file).items():
                self.dtypes[name] = header.dtype
                self._files[name] = file

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names, on the CPU."""
        wanted = set(names)
        found: dict[str, Tensor] = {}
        for file in {self._files[name] for name in wanted}:
            with safe_open(file, framework="pt") as tensors:
                found |= {name: tensors.get_tensor(name) for name in wanted if self._files[name] == file}
        return found

    def rows(self, name: str, indices: Iterable[int]) -> Tensor:
        """Some rows of one tensor, on the CPU; reads no others."""
        with safe_open(self._files[name], framework="pt") as tensors:
            part = tensors.get_slice(name)
            return cat([part[index : index + 1] for index in indices])


def headers_of(file: Path) -> dict[str, Header]:
    """Dtype and shape of each tensor of a safetensors file, by name; reads no more than its header."""
    with safe_open(file, framework="pt") as tensors:
        parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: Header(part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers would load, whether or not they are there; [] if it finds none.

    A repository may hold the same weights in another layout as well.

    Raises:
        ValueError: an index is damaged.
    """
    for single in (folder / "model.safetensors", folder / "pytorch_model.bin"):
        index = folder / f"{single.name}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return [folder / name for name in sorted(names)]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(f"{index} is damaged; download it again") from None
    return []
