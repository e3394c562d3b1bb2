"""The header of `adapter_model.safetensors`: where each pair of matrices is.  No torch.

Format: https://huggingface.co/docs/safetensors.  Every length is compared with the file's own size before anything of
that length is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import msgspec

from inflight.adapters.adapter_error import AdapterError

__all__ = ["MAX_FILE_BYTES", "MAX_HEADER_BYTES", "Matrix", "Pair", "pairs_of"]

MAX_FILE_BYTES = 1 << 34  # rank 512 on all layers of 70 billion weights, in float32
MAX_HEADER_BYTES = 1 << 24
_MAX_TENSORS = 1 << 17
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_KEY = re.compile(r"base_model\.model\.([A-Za-z0-9_.]{1,512})\.lora_([AB])\.weight")
_AGAIN = "save the adapter again"


class Matrix(NamedTuple):
    """A tensor in the file.

    Attributes:
        key: its name there.
        dtype: "F32", "F16" or "BF16".
        start, stop: its bytes, behind the header.
    """

    key: str
    dtype: str
    shape: tuple[int, int]
    start: int
    stop: int


class Pair(NamedTuple):
    """The two matrices of a module: its output grows by `scale * B A x`.

    Attributes:
        a: [rank, in_features].
        b: [out_features, rank].
    """

    a: Matrix
    b: Matrix

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def pairs_of(header: bytes, num_bytes: int) -> dict[str, Pair]:
    """The pairs by their modules' paths in the model.

    Args:
        header: the JSON text.
        num_bytes: of the file behind the header.

    Raises:
        AdapterError: damaged, or it has tensors that are no pair of an adapter.
    """
    try:
        tensors = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        tensors.pop("__metadata__", None)
        infos = {key: msgspec.json.decode(raw, type=_Tensor) for key, raw in tensors.items()}
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"the header of adapter_model.safetensors is damaged: {error}; {_AGAIN}") from None
    if not 0 < len(infos) <= _MAX_TENSORS:
        raise AdapterError(f"adapter_model.safetensors has {len(infos)} tensors: 1 to {_MAX_TENSORS}; {_AGAIN}")
    found: dict[str, dict[str, Matrix]] = {}
    for key, info in infos.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(_other_key(key))
        found.setdefault(match[1], {})[match[2]] = _matrix(key, info)
    _check_bytes([matrix for halves in found.values() for matrix in halves.values()], num_bytes)
    return {module: _pair(module, halves) for module, halves in found.items()}


def _matrix(key: str, info: _Tensor) -> Matrix:
    if info.dtype not in _SIZES:
        raise AdapterError(f"{key} has dtype {info.dtype[:20]!a}: must be one of {', '.join(_SIZES)}; {_AGAIN}")
    if len(info.shape) != 2 or not all(0 < size < 2**31 for size in info.shape):
        raise AdapterError(f"{key} has shape {info.shape[:5]}: must be a matrix; only linear layers are served")
    start, stop = info.data_offsets
    if stop - start != prod(info.shape) * _SIZES[info.dtype] or start < 0:
        raise AdapterError(f"{key} has bytes {start} to {stop}, which is not the size of {info.shape}; {_AGAIN}")
    return Matrix(key, info.dtype, (info.shape[0], info.shape[1]), start, stop)


def _check_bytes(matrices: list[Matrix], num_bytes: int) -> None:
    """The tensors fill the file without gaps, as the format demands."""
    at = 0
    for matrix in sorted(matrices, key=lambda matrix: matrix.start):
        if matrix.start != at:
            raise AdapterError(f"{matrix.key} begins at byte {matrix.start} in place of {at}; {_AGAIN}")
        at = matrix.stop
    if at != num_bytes:
        raise AdapterError(f"adapter_model.safetensors has {num_bytes} bytes of tensors in place of {at}; {_AGAIN}")


def _pair(module: str, halves: Mapping[str, Matrix]) -> Pair:
    if len(halves) != 2:
        (half,) = halves
        missing = "B" if half == "A" else "A"
        raise AdapterError(f"{module} has lora_{half} but no lora_{missing}; {_AGAIN}")
    pair = Pair(halves["A"], halves["B"])
    if pair.b.shape[1] != pair.rank:
        shapes = f"{list(pair.a.shape)} and {list(pair.b.shape)}"
        raise AdapterError(f"{module} has lora_A and lora_B of shapes {shapes}: [r, in] and [out, r]; {_AGAIN}")
    return pair


def _other_key(key: str) -> str:
    """Why a tensor is not served."""
    name = f"{key[:200]!a}"
    merge = "merge the adapter into the checkpoint"
    if "lora_magnitude_vector" in key:
        return f"{name} belongs to DoRA, which is not served; {merge}"
    if "lora_embedding_" in key:
        return f"{name} adapts an embedding, which is not served; {merge}"
    if key.endswith(".bias"):
        return f"{name} is a bias, which is not served; {merge}"
    return f"{name} is no tensor of a LoRA adapter: keys are base_model.model.MODULE.lora_A.weight, lora_B; {_AGAIN}"
