"""How the tensors of one layer contain its weight: what the formats of checkpoints have in common."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inflight.loading.load_errors import LoadError
from inflight.loading.quantization.stored_weight import Coded

__all__ = ["DAMAGED", "FLOATS", "Format", "Header", "Packing", "checked", "order_of", "scales_of", "unpacked"]

FLOATS = ("F16", "BF16", "F32")  # dtypes of scales, as safetensors call them
_LARGEST = 2.0**100  # of a scale: its product with a code is finite
DAMAGED = "download the checkpoint again"


class Header(NamedTuple):
    """A tensor's dtype, as safetensors call it ("BF16", "I32"), and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Packing(Protocol):
    """How a layer's weight is stored.  Tensors are named as in the layer: "qweight", "weight.absmax"."""

    def tensors(self, name: str, size: tuple[int, int], found: Mapping[str, Header]) -> dict[str, Header]:
        """The tensors that contain the weight of a layer with `size` outputs and inputs.

        Args:
            name: of the layer, for messages.
            found: all tensors of the layer.

        Raises:
            LoadError: one is missing, or has another dtype or shape than it must have.
        """

    def weight(self, name: str, size: tuple[int, int], tensors: Mapping[str, Tensor]) -> Coded:
        """The weight in tensors that have the headers of `tensors`.

        Raises:
            LoadError: numbers in a tensor mean nothing.
        """


class Format(Protocol):
    """How the layers of a checkpoint are stored, by its quantization_config.

    Attributes:
        codes: names of tensors that contain codes, within a layer.
        elsewhere: names of tensors that no module of the model has a place for; None if there are none.
    """

    codes: tuple[str, ...]
    elsewhere: re.Pattern[str] | None

    def packing(self, name: str, found: Mapping[str, Header]) -> Packing | None:
        """How the layer `name` is stored, which has the tensors `found`; None if its weight is plain.

        Raises:
            LoadError: in a way that is not supported.
        """


def checked(
    name: str, found: Mapping[str, Header], tensor: str, dtypes: Collection[str], *shapes: Sequence[int]
) -> Header:
    """The header of a tensor of layer `name`, which has one of these dtypes and shapes.

    Raises:
        LoadError: it is missing, or something else.
    """
    header = found.get(tensor)
    if header is None:
        raise LoadError(f"{name}.{tensor} is in none of its files")
    if header.dtype not in dtypes:
        raise LoadError(f"{name}.{tensor} has dtype {header.dtype}, not {' or '.join(dtypes)}")
    if header.shape not in [tuple(shape) for shape in shapes]:
        expected = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
        raise LoadError(f"{name}.{tensor} has shape {list(header.shape)}, and its config.json implies {expected}")
    return header


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [R, W] -> uint8 [R, count]: the codes of 4 or 8 bits in each row of words, lowest bits first."""
    # The bytes of a little-endian machine, as safetensors expect; `view` wants a stride of 1 even for one word a row.
    octets = words.contiguous().flatten().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), -1).flatten(1)
    return octets[:, :count]


def scales_of(name: str, scales: Tensor) -> Tensor:
    """float32, contiguous.

    Args:
        name: of the tensor.

    Raises:
        LoadError: a scale is not a number, infinite or of a size that no weight has, or all are zero.
    """
    scales = scales.to(torch.float32).contiguous()
    if not bool(scales.isfinite().all()):
        raise LoadError(f"{name} has infinite or undefined scales; {DAMAGED}")
    if (largest := float(scales.abs().max())) > _LARGEST:
        raise LoadError(f"{name} has a scale of {largest:.3g}, which weights cannot have; {DAMAGED}")
    if not largest:
        raise LoadError(f"{name}: all of its scales are zero; {DAMAGED}")
    return scales


def order_of(name: str, groups: Tensor, group: int) -> Tensor | None:
    """The order in which groups are contiguous; None if they are.

    Args:
        name: of the tensor.
        groups: integers [K], the group of each input.
        group: inputs of each group.

    Raises:
        LoadError: there is no such group, or one has more or less inputs.
    """
    count = len(groups) // group
    groups = groups.long()
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= count:
        raise LoadError(f"{name} names the group {low if low < 0 else high}, and there are {count}; {DAMAGED}")
    sizes = groups.bincount(minlength=count)
    if not bool((sizes == group).all()):
        odd = int((sizes != group).nonzero()[0])
        raise LoadError(f"{name}: group {odd} has {int(sizes[odd])} inputs, not group_size={group}; {DAMAGED}")
    order = groups.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order
