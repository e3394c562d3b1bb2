"""The header of a GGUF file: metadata, and where each tensor is.

Every length in a file is compared with the file's own size before anything of that length is made.  The header itself
may have at most `HEADER_BYTES`; those of real models have a few MiB.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from inflight.gguf.tensor_types import READABLE, TYPE_NAMES, TensorType

__all__ = ["HEADER_BYTES", "GgufError", "GgufHeader", "TensorInfo", "read_header"]

HEADER_BYTES = 64 << 20
_MAX_DIMENSIONS, _MAX_NAME = 4, 256
_DAMAGED = "download it again"
_OTHER_FILE = "use a file of the model in Q4_K_M, Q6_K or Q8_0, or its Hugging Face checkpoint"

_STRING, _ARRAY = 8, 9
_DTYPES = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
_NUMBERS = {kind: np.dtype(name) for kind, name in enumerate(_DTYPES) if name is not None}


class GgufError(ValueError):
    """The file cannot be served; the message is one line that says why, and what to do."""


class TensorInfo(NamedTuple):
    """A tensor in a file.

    Attributes:
        shape: as torch has it: the last dimension is contiguous.
        start: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.type.numbers * self.type.num_bytes

    @property
    def rows(self) -> tuple[int, ...]:
        """Its shape in bytes: each row contains whole blocks."""
        return (*self.shape[:-1], self.shape[-1] // self.type.numbers * self.type.num_bytes)


@dataclass(frozen=True)
class GgufHeader:
    """
    Attributes:
        metadata: numbers, strings, lists of strings, and arrays of numbers, by their keys.
        tensors: by their names in the file; they lie in the file, and do not overlap.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """
    Raises:
        GgufError: it cannot be read, is no GGUF file, or is damaged; or it is of a kind that is not served.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size == 0:
                raise GgufError("the file is empty; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(path, content, size).header()
    except OSError as error:
        raise GgufError(f"it cannot be read: {error.strerror or error}") from None


class _Reader:
    """Reads a header from its beginning; `_at` is the next byte."""

    def __init__(self, path: Path, content: mmap.mmap, size: int) -> None:
        self._path, self._content, self._size, self._at = path, content, size, 0

    def header(self) -> GgufHeader:
        num_tensors, num_keys = self._counts()
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = self._name(f"key {index} of the metadata")
            if key in metadata:
                raise GgufError(f"its metadata has {key!r} twice; {_DAMAGED}")
            metadata[key] = self._value(key, self._integer("<I", key))
        _expect_whole(self._path, metadata)
        infos = [self._tensor(index) for index in range(num_tensors)]
        return GgufHeader(self._path, metadata, self._placed(infos, self._alignment(metadata)))

    def _counts(self) -> tuple[int, int]:
        """Of tensors and keys, which take at least 12 bytes each."""
        if self._content[:4] != b"GGUF":
            raise GgufError("it is no GGUF file: it does not begin with GGUF; give a Hugging Face checkpoint directory")
        self._at = 4
        version = self._integer("<I", "the version")
        if version & 0xFFFF == 0 and version:
            raise GgufError("it is big-endian; convert it with gguf-convert-endian of the package gguf")
        if version not in (2, 3):
            raise GgufError(f"it has version {version} of the format (served: 2 and 3); convert the model anew")
        counts = [(self._integer("<Q", what), what) for what in ("the number of tensors", "the number of keys")]
        for count, what in counts:
            if count > self._left() // 12:
                raise GgufError(f"{what} is {count}, for which the file is too small; {_DAMAGED}")
        return counts[0][0], counts[1][0]

    def _left(self) -> int:
        return min(self._size, HEADER_BYTES) - self._at

    def _take(self, count: int, what: str) -> int:
        """Where `count` bytes begin, which are then behind `_at`."""
        if count > self._left():
            if self._at + count > self._size:
                raise GgufError(f"{what} would end beyond the file of {self._size} bytes; {_DAMAGED}")
            raise GgufError(f"{what} would end beyond {HEADER_BYTES >> 20} MiB, which a header may have; {_DAMAGED}")
        at, self._at = self._at, self._at + count
        return at

    def _integer(self, layout: str, what: str) -> int:
        return struct.unpack_from(layout, self._content, self._take(struct.calcsize(layout), what))[0]

    def _string(self, what: str) -> str:
        length = self._integer("<Q", what)
        at = self._take(length, what)
        try:
            return self._content[at : at + length].decode("utf-8")
        except UnicodeDecodeError:
            raise GgufError(f"{what} is not UTF-8; {_DAMAGED}") from None

    def _name(self, what: str) -> str:
        """A string that a message of one line can contain."""
        name = self._string(what)
        if not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
            raise GgufError(f"{what} is no name of 1 to {_MAX_NAME} printable characters; {_DAMAGED}")
        return name

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            kind, count = self._integer("<I", key), self._integer("<Q", key)
            if kind == _STRING:
                if count > self._left() // 8:
                    raise GgufError(f"{key} has {count} entries, for which the file is too small; {_DAMAGED}")
                return [self._string(f"{key}[{index}]") for index in range(count)]
            return self._numbers(key, kind, count)
        number = self._numbers(key, kind, 1)[0]
        return (
            float(str(number)) if number.dtype == np.float32 else number.item()
        )  # 1e-05, as the model's config has it

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            raise GgufError(f"{key} has a value of type {kind}, which the format does not have here; {_DAMAGED}")
        at = self._take(count * dtype.itemsize, key)
        return np.frombuffer(self._content[at : self._at], dtype)

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        found = metadata.get("general.alignment", 32)
        if not isinstance(found, int) or not 8 <= found <= 1 << 20 or found & (found - 1):
            raise GgufError(f"general.alignment is {found!r}, not a power of 2 from 8 to {1 << 20}; {_DAMAGED}")
        return found

    def _tensor(self, index: int) -> TensorInfo:
        """`start` is relative to the first byte of all tensors."""
        name = self._name(f"the name of tensor {index}")
        num_dimensions = self._integer("<I", name)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise GgufError(f"{name} has {num_dimensions} dimensions (1 to {_MAX_DIMENSIONS}); {_DAMAGED}")
        shape = tuple(self._integer("<Q", name) for _ in range(num_dimensions))[::-1]
        kind, start = self._integer("<I", name), self._integer("<Q", name)
        if 0 in shape:
            raise GgufError(f"{name} has shape {list(shape)}, which contains nothing; {_DAMAGED}")
        if kind not in READABLE:
            called = TYPE_NAMES.get(kind, f"the unknown type {kind}")
            served = ", ".join(entry.name for entry in READABLE.values())
            raise GgufError(f"{name} is stored as {called} (served: {served}); {_OTHER_FILE}")
        type = READABLE[kind]
        if shape[-1] % type.numbers:
            raise GgufError(f"{name} has rows of {shape[-1]} numbers, and blocks of {type.name} have {type.numbers}")
        return TensorInfo(name, shape, type, start)

    def _placed(self, infos: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        first = -(-self._at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for info in infos:
            if info.name in placed:
                raise GgufError(f"it has two tensors called {info.name}; {_DAMAGED}")
            if info.start % alignment:
                raise GgufError(f"{info.name} begins at {info.start}, which is no multiple of {alignment}; {_DAMAGED}")
            placed[info.name] = info._replace(start=first + info.start)
        for before, info in _neighbours(placed):
            end = info.start + info.num_bytes
            if end > self._size:
                raise GgufError(
                    f"{info.name}, {info.type.name} of shape {list(info.shape)}, would end at byte {end}, and the file "
                    f"has {self._size} bytes: it is incomplete; {_DAMAGED}"
                )
            if before is not None and before.start + before.num_bytes > info.start:
                raise GgufError(f"{before.name} and {info.name} overlap; {_DAMAGED}")
        return placed


def _neighbours(placed: Mapping[str, TensorInfo]) -> Iterator[tuple[TensorInfo | None, TensorInfo]]:
    """Each tensor, with the one that begins before it."""
    ordered = sorted(placed.values(), key=lambda info: info.start)
    return zip([None, *ordered], ordered)


def _expect_whole(path: Path, metadata: Mapping[str, Any]) -> None:
    """
    Raises:
        GgufError: it is one of several files of a model.
    """
    count = metadata.get("split.count", 0)
    if (isinstance(count, int) and count > 1) or re.search(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", path.name):
        raise GgufError(
            "it is one of several files of a model; merge them: "
            "llama-gguf-split --merge FIRST-00001-of-0000N.gguf OUT.gguf"
        )
