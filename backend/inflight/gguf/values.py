"""Metadata of a GGUF file, with names in the messages for what is missing or impossible."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from inflight.gguf.header import GgufError, GgufHeader, TensorInfo

__all__ = ["Values"]

_MAX_COUNT = 2**31 - 1


class Values:
    """The keys of a file's architecture: `count("block_count")` is llama.block_count in the file of a llama.

    Attributes:
        architecture: general.architecture.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        found = header.metadata.get("general.architecture")
        if not isinstance(found, str) or not found.isprintable():
            raise GgufError(f"general.architecture is {found!r:.80}, not a name; download the file again")
        self.architecture = found

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number from `least` on; `default` if the key is missing, which None forbids."""
        key, value = self._found(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_COUNT:
            raise GgufError(f"{key} is {_shown(value)}, not one whole number of at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        key, value = self._found(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise GgufError(f"{key} is {_shown(value)}, not a number above 0")
        return float(value)

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.header.metadata

    def text(self, name: str) -> str | None:
        value = self.header.metadata.get(f"{self.architecture}.{name}")
        return value if isinstance(value, str) else None

    def tensor(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """
        Raises:
            GgufError: there is none, or it has another shape than its metadata says.
        """
        info = self.header.tensors.get(name)
        if info is None:
            raise GgufError(f"the tensor {name} is missing; download the file again")
        if info.shape != shape:
            raise GgufError(f"{name} has shape {list(info.shape)}, and its metadata says {list(shape)}")
        return info

    def factors(self, name: str, length: int) -> list[float] | None:
        """The numbers of a small tensor in float32, if the file has it."""
        if name not in self.header.tensors:
            return None
        info = self.tensor(name, (length,))
        if info.type.name != "F32":
            raise GgufError(f"{name} is stored as {info.type.name}, not F32")
        with self.header.path.open("rb") as file:
            file.seek(info.start)
            numbers = np.frombuffer(file.read(info.num_bytes), "<f4")
        if len(numbers) != length or not (np.isfinite(numbers) & (numbers > 0)).all():
            raise GgufError(f"{name} has numbers that are not above 0; download the file again")
        return numbers.tolist()

    def _found(self, name: str, default: Any) -> tuple[str, Any]:
        key = f"{self.architecture}.{name}"
        value = self.header.metadata.get(key, default)
        if value is None:
            raise GgufError(f"its metadata has no {key}; convert the model anew")
        return key, value


def _shown(value: Any) -> str:
    return f"an array of {len(value)} values" if isinstance(value, (list, np.ndarray)) else f"{value!r:.40}"
