"""Single tensors of a checkpoint, for what transformers does not load."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from inflight.hub import snapshot

__all__ = ["TensorFiles"]


class TensorFiles:
    """The safetensors files of a checkpoint: a directory, or a hub id whose files have been downloaded.

    Attributes:
        dtypes: of all tensors, by name, as the files' headers spell them: "BF16", "F8_E4M3".
    """

    def __init__(self, model: str, revision: str | None = None) -> None:
        folder = snapshot(model, revision)
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        for file in [] if folder is None else _files_of(folder):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    self.dtypes[name] = tensors.get_slice(name).get_dtype()
                    self._files[name] = file

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names, on the CPU."""
        wanted = set(names)
        found: dict[str, Tensor] = {}
        for file in {self._files[name] for name in wanted}:
            with safe_open(file, framework="pt") as tensors:
                found |= {name: tensors.get_tensor(name) for name in wanted if self._files[name] == file}
        return found


def _files_of(folder: Path) -> list[Path]:
    """The files that transformers would load; a repository may hold the same weights in another layout as well."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))
