"""The checkpoint that is quantized: what it must be, its modules without weights, and its tensors one by one."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from inflight.attention.reference import ReferenceAttention
from inflight.config import ConfigError, EngineConfig
from inflight.gguf.hub_names import hub_name
from inflight.hub import CheckpointFileError, snapshot
from inflight.loading.check.cases import has_experts
from inflight.loading.checkpoint.checkpoint_config import dtype_of, max_model_len, read_config
from inflight.loading.checkpoint.quant_method import quant_method
from inflight.loading.checkpoint.tensor_files import TensorFiles, headers_of, weight_files
from inflight.loading.checkpoint.weights import from_config
from inflight.loading.load_errors import LoadError, NotRecognised
from inflight.loading.paged_layers import PagedLayers
from inflight.loading.quantization.packing import Header
from inflight.loading.recognise.attention_probe import probe
from inflight.loading.recognise.decoder import decoder_of
from inflight_tools.quantize.refused import Refused

__all__ = ["HEAD", "Source", "open_source"]

HEAD = "lm_head"
_EMBEDDING = "model.embed_tokens.weight"
_CPU = torch.device("cpu")
_VOCABULARY = 64  # of the model that is only recognised
_ROWS = 4096  # looked at at once
_UNQUANTIZED = "give the folder of the model's unquantized checkpoint"


@dataclass
class Source:
    """A checkpoint of a decoder that the native forward pass knows.

    Attributes:
        config: config.json as it is.
        model: all modules, without weights: on the meta device, and in float32.
        rotary_embedding: the model's, which computes.
        dtype: of the checkpoint, and so of scales.
        max_length: tokens of the longest sequence.
        headers: of all tensors in its files.
    """

    folder: Path
    config: dict[str, Any]
    model: Any
    rotary_embedding: nn.Module
    dtype: torch.dtype
    max_length: int
    headers: dict[str, Header]
    files: TensorFiles

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.model.layers

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return f"{HEAD}.weight" in self.model.all_tied_weights_keys

    def names_in(self, prefix: str) -> list[str]:
        """Names of the tensors of a module."""
        return [name for name in self.headers if name.startswith(f"{prefix}.")]

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored; pages of the file, until it is copied."""
        return self.files.read([name])[name]

    def weight_of_head(self) -> Tensor:
        """As it is stored."""
        return self.read(_EMBEDDING if self.is_tied else f"{HEAD}.weight")

    def embedded(self, token_ids: Tensor) -> Tensor:
        """float32 [T, H]: the embedding's rows."""
        return self.read(_EMBEDDING)[token_ids].float()

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Give a module of `model` its weights, in float32."""
        module.to_empty(device=_CPU)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.read(f"{prefix}.{name}"))

    @staticmethod
    def empty(module: nn.Module) -> None:
        """Free the weights of a module."""
        module.to("meta")


def open_source(model: str) -> Source:
    """
    Raises:
        Refused: it is not a checkpoint that can be quantized; says what to give instead.
    """
    folder = _folder(model)
    config = _config(folder)
    try:
        options = EngineConfig.from_dict({"model": str(folder), "device": "cpu"})
        hf_config = read_config(options)
        method = quant_method(hf_config)
        if method is not None:
            raise Refused(f"{model} is quantized already (quant_method {method!r}): {_UNQUANTIZED}")
        text_config = hf_config.get_text_config(decoder=True)
        if has_experts(text_config):
            raise Refused(
                f"{model} ({hf_config.model_type}) is a mixture of experts, which are not linear layers here: serve it "
                'with "quantization" in model.json, or give a dense model'
            )
        (files, headers), dtype = _files(model, folder), dtype_of("auto", text_config)
        small = _recognised(options, hf_config, max_model_len(options, text_config))
        whole = from_config(options, copy.deepcopy(hf_config), torch.float32, torch.device("meta"))
        whole.set_attn_implementation("sdpa")  # type: ignore[operator]
        source = Source(
            folder=folder,
            config=config,
            model=whole.eval().requires_grad_(False),
            rotary_embedding=small.model.rotary_emb,
            dtype=dtype,
            max_length=max_model_len(options, text_config),
            headers=headers,
            files=files,
        )
    except (ConfigError, LoadError, CheckpointFileError) as error:
        raise Refused(str(error)) from error
    except NotRecognised as error:
        raise Refused(
            f"{model} ({hf_config.model_type}) is not one of the decoders that can be quantized, such as llama, "
            f'mistral, qwen2, qwen3, phi3, granite and smollm3: {error}; serve it with "quantization" in model.json'
        ) from error
    _expect_all(source, small)
    _expect_numbers(source)
    return source


def _folder(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_file() or hub_name(model) is not None:
        raise Refused(f"{model} is a file, and a GGUF file has been quantized already: {_UNQUANTIZED}")
    try:
        folder = snapshot(str(path) if path.is_dir() else model)
    except CheckpointFileError as error:
        raise Refused(str(error)) from error
    if folder is None:
        raise Refused(
            f"{model}: no such folder, and the cache of the hub does not have it: give a folder, or run "
            f"`hf download {model}` first"
        )
    return folder.resolve()


def _config(folder: Path) -> dict[str, Any]:
    if (folder / "adapter_config.json").exists():
        raise Refused(f"{folder} is an adapter: merge it into its model, and give the merged checkpoint")
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refused(f"{folder} has no config.json: give the folder of a Hugging Face checkpoint") from None
    except ValueError as error:
        raise Refused(f"{folder / 'config.json'} is damaged: {error}") from None


def _files(model: str, folder: Path) -> tuple[TensorFiles, dict[str, Header]]:
    try:
        found = weight_files(folder)
    except ValueError as error:
        raise Refused(f"{model}: {error}") from None
    missing = [file.name for file in found if not file.is_file()]
    if missing:
        raise Refused(f"{model}: {missing[0]} is missing; download the checkpoint again")
    if not found or any(file.suffix != ".safetensors" for file in found):
        raise Refused(f"{model} has no weights in safetensors: convert them with transformers' save_pretrained")
    headers: dict[str, Header] = {}
    try:
        for file in found:
            headers |= headers_of(file)
    except SafetensorError as error:
        raise Refused(f"{model}: {file.name} is damaged ({error}); download the checkpoint again") from None
    return TensorFiles(str(folder)), headers


def _recognised(options: EngineConfig, hf_config: Any, length: int) -> Any:
    """A model of the first layers, with a small vocabulary and random weights, that has been recognised.

    Raises:
        NotRecognised: it is another decoder than those of the native forward pass.
        LoadError: its attention is not supported.
    """
    few = copy.deepcopy(hf_config)
    text_config = few.get_text_config(decoder=True)
    kinds = getattr(text_config, "layer_types", None) or []
    count = max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)
    text_config.num_hidden_layers, text_config.vocab_size = count, _VOCABULARY
    text_config.pad_token_id = None
    if kinds:
        text_config.layer_types = kinds[:count]
    model: Any = from_config(options, few, torch.float32, _CPU).eval().requires_grad_(False)
    layers = probe(model, text_config, length, _CPU).layers
    PagedLayers(layers, ReferenceAttention(), options.block_size, torch.float32, _CPU).allocate(1)
    decoder_of(model)
    return model


def _expect_all(source: Source, small: Any) -> None:
    """
    Raises:
        Refused: a layer differs from the recognised ones, or a tensor is missing or has another shape.
    """
    known = {_structure(layer) for layer in small.model.layers}
    for index, layer in enumerate(source.layers):
        if _structure(layer) not in known or list(layer.buffers()):
            raise Refused(f"{source.folder}: layer {index} differs from the first ones, which is not supported")
    tied = set(source.model.all_tied_weights_keys)
    for name, parameter in source.model.named_parameters():
        if name in tied:
            continue
        header = source.headers.get(name)
        if header is None or header.shape != tuple(parameter.shape):
            what = "is in none of its files" if header is None else f"has shape {list(header.shape)}"
            raise Refused(f"{source.folder}: {name} {what}, and config.json implies {list(parameter.shape)}")
        if header.dtype not in ("BF16", "F16", "F32"):
            raise Refused(f"{source.folder}: {name} has dtype {header.dtype}, not BF16, F16 or F32: {_UNQUANTIZED}")


def _expect_numbers(source: Source) -> None:
    """Of weights outside the layers, which are copied; those of a layer are looked at when it is quantized.

    Raises:
        Refused: some are infinite or not numbers.
    """
    in_layers = {f"model.layers.{name}" for name, _ in source.layers.named_parameters()}
    copied = [name for name, _ in source.model.named_parameters() if name not in in_layers and name in source.headers]
    for name in copied:
        if not all(bool(rows.isfinite().all()) for rows in source.read(name).split(_ROWS)):
            raise Refused(f"{source.folder}: {name} has values that are infinite or not numbers; download it again")


def _structure(layer: nn.Module) -> tuple[tuple[str, type], ...]:
    return tuple((name, type(module)) for name, module in layer.named_modules())
