"""Files of llama.cpp (GGUF): their tensors under transformers' names, in the codes of the file.

The frontend and this module read the same unpacked configuration (`inflight.gguf.unpacked`); tensors are mapped from
the file itself.  Rows are moved as bytes, so nothing that is stored is rounded before it is dequantised.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inflight.config import EngineConfig
from inflight.gguf.architectures import Architecture, architecture_of, tensor_names
from inflight.gguf.header import GgufError, GgufHeader, TensorInfo, read_header
from inflight.gguf.tensor_types import PLAIN
from inflight.hub import gguf_file
from inflight.loading.checkpoint.gguf_format import GgufFormat, checked_blocks
from inflight.loading.checkpoint.stored_checkpoint import load_codes, without_quantization
from inflight.loading.checkpoint.weights import from_config, pretrained
from inflight.loading.load_errors import LoadError
from inflight.loading.quantization.block_weight import BLOCK_KINDS
from inflight.loading.quantization.coded_linear import keeps_codes
from inflight.loading.quantization.schemes import scheme_of
from inflight.loading.quantization.stored_weight import ROWS

__all__ = ["load_gguf"]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _Tensors:
    """
    Attributes:
        state: by transformers' names; codes of a linear layer are called as their kind: "….up_proj.Q4_K".
        sources: llama.cpp's name of the weight of each layer with codes.
    """

    state: dict[str, Tensor]
    sources: dict[str, str]


def load_gguf(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model of a GGUF file on `device`.

    Raises:
        LoadError: the file is damaged, or contradicts its own metadata; by the name of a tensor.
    """
    file = gguf_file(config.model, config.revision)
    if file is None:
        raise LoadError(
            f"{config.model!r} has quant_method='gguf' in its config.json, and is no file; give the GGUF file itself"
        )
    plain = without_quantization(hf_config)
    try:
        header = read_header(file)
        names = tensor_names(header)
        model = from_config(config, plain, dtype, torch.device("meta"))
        _expect_places(model, header, names)
        found = _tensors(model, header, names, hf_config.to_dict(), dtype)
        if keeps_codes(config, device):
            _share_codes(found, header, names)
    except (GgufError, LoadError) as error:
        raise LoadError(f"{config.model!r} ({hf_config.model_type}) cannot be loaded: {error}") from None
    if found.sources:
        return load_codes("gguf", config, hf_config, dtype, device, GgufFormat(found.sources), found.state)
    model = pretrained(config, plain, dtype, torch.device("cpu"), state_dict=found.state)
    return scheme_of(config).place(model, hf_config, device, config.check_on_load).eval().requires_grad_(False)


def _expect_places(model: nn.Module, header: GgufHeader, names: Mapping[str, str]) -> None:
    """
    Raises:
        GgufError: a tensor has no place in the model or another shape, or a weight of the model is missing.
    """
    wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    tied = set() if "output.weight" in names else {"lm_head.weight"}
    for source, name in names.items():
        shape = header.tensors[source].shape
        if name not in wanted:
            raise GgufError(f"its metadata describes a model that has no place for {source}; convert the model anew")
        if shape != wanted[name]:
            raise GgufError(f"{source} has shape {list(shape)}, and its metadata implies {list(wanted[name])}")
    missing = sorted(wanted.keys() - set(names.values()) - tied)
    if missing:
        raise GgufError(f"{len(missing)} weights are not in the file, such as {missing[0]}; download it again")


def _tensors(
    model: nn.Module, header: GgufHeader, names: Mapping[str, str], hf_config: Mapping[str, Any], dtype: torch.dtype
) -> _Tensors:
    architecture = architecture_of(header)
    with header.path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # is closed with the last tensor that views it
    found = _Tensors({}, {})
    for source, name in names.items():
        info = header.tensors[source]
        layer, _, kind = name.rpartition(".")
        rows = _in_order(_mapped(content, info), architecture.heads_of(source, hf_config))
        if info.type.name in PLAIN:
            found.state[name] = _plain(rows, info, architecture)
        elif kind == "weight" and type(model.get_submodule(layer)) is nn.Linear:
            found.state[f"{layer}.{info.type.name}"] = rows
            found.sources[layer] = source
        else:
            found.state[name] = _dequantised(rows, info, dtype)
    return found


def _share_codes(found: _Tensors, header: GgufHeader, names: Mapping[str, str]) -> None:
    """Give the head of a model that ties it the codes of the embedding: a head is multiplied, a table is not."""
    source = next((source for source, name in names.items() if name == "model.embed_tokens.weight"), None)
    info = None if source is None else header.tensors[source]
    if info is None or "output.weight" in names or info.type.name in PLAIN:
        return
    with header.path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found.state[f"lm_head.{info.type.name}"] = _mapped(content, info)
    found.sources["lm_head"] = info.name


def _mapped(content: mmap.mmap, info: TensorInfo) -> Tensor:
    """uint8, in the shape of its rows in bytes; a view of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a buffer that cannot be written
        return torch.frombuffer(content, dtype=torch.uint8, count=info.num_bytes, offset=info.start).view(info.rows)


def _in_order(rows: Tensor, num_heads: int | None) -> Tensor:
    """The rows of each head in transformers' order: first halves, then second ones.

    Args:
        num_heads: llama.cpp stores the rows i and i + size / 2 of each head as neighbours; None: it does not.
    """
    if num_heads is None:
        return rows
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _plain(rows: Tensor, info: TensorInfo, architecture: Architecture) -> Tensor:
    numbers = rows.view(-1).view(_DTYPES[info.type.name]).view(info.shape)
    if architecture.norm_offset and info.name.endswith("norm.weight"):
        return numbers.to(torch.float32) - architecture.norm_offset
    return numbers


def _dequantised(rows: Tensor, info: TensorInfo, dtype: torch.dtype) -> Tensor:
    """A table of an embedding, whose rows are read and not multiplied."""
    weight = checked_blocks(info.name, BLOCK_KINDS[info.type.name], rows.reshape(-1, rows.shape[-1]))
    plain = torch.empty(weight.shape, dtype=dtype)
    for start in range(0, len(plain), ROWS):
        plain[start : start + ROWS] = weight.dequantize(start, start + ROWS)
    return plain.view(info.shape)
