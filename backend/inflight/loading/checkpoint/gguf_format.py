"""Linear layers in llama.cpp's blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from torch import Tensor

from inflight.loading.load_errors import LoadError
from inflight.loading.quantization.block_weight import BLOCK_KINDS, BlockKind, BlockWeight
from inflight.loading.quantization.packing import DAMAGED, Header, checked, scales_of

__all__ = ["GgufFormat", "GgufPacking", "checked_blocks"]

_DEQUANTISES = "transformers.integrations.gguf"


class GgufFormat:
    """A `Format`: each layer has one tensor of codes, which is called as its kind.

    Args:
        sources: llama.cpp's name of the weight of each layer, for messages.
    """

    codes: tuple[str, ...] = tuple(BLOCK_KINDS)
    elsewhere: re.Pattern[str] | None = None

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def packing(self, name: str, found: Mapping[str, Header]) -> GgufPacking | None:
        kind = next((kind for kind in BLOCK_KINDS if kind in found), None)
        return None if kind is None else GgufPacking(BLOCK_KINDS[kind], self._sources[name])


@dataclass(frozen=True)
class GgufPacking:
    """A `Packing`.

    Attributes:
        source: llama.cpp's name of the weight.
    """

    kind: BlockKind
    source: str

    def tensors(self, name: str, size: tuple[int, int], found: Mapping[str, Header]) -> dict[str, Header]:
        num_outputs, num_inputs = size
        num_bytes = num_inputs // self.kind.numbers * self.kind.num_bytes
        return {self.kind.name: checked(name, found, self.kind.name, ("U8",), (num_outputs, num_bytes))}

    def weight(self, name: str, size: tuple[int, int], tensors: Mapping[str, Tensor]) -> BlockWeight:
        return checked_blocks(self.source, self.kind, tensors[self.kind.name])


def checked_blocks(source: str, kind: BlockKind, blocks: Tensor) -> BlockWeight:
    """
    Args:
        source: name of the tensor in its file.
        blocks: uint8 [N, bytes of a row].

    Raises:
        LoadError: a scale is not a number or infinite, or all are zero; or the installed transformers is too old for
            a kind that it dequantises.
    """
    if kind.read is None and find_spec(_DEQUANTISES) is None:
        raise LoadError(
            f"{source} is stored as {kind.name}, which only newer versions of transformers dequantise: update it, or "
            "use a file of the model in Q4_K_M, Q6_K or Q8_0"
        )
    weight = BlockWeight(kind, blocks)
    halves = weight.halves()
    scales_of(source, halves[:, :1])
    if not bool(halves.isfinite().all()):
        raise LoadError(f"{source} has infinite or undefined minimums; {DAMAGED}")
    return weight
