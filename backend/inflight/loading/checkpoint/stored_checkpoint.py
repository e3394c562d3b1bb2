"""Checkpoints of integers, or of indices of a table: GPTQ, AWQ, AutoRound, compressed-tensors, bitsandbytes.

`StoredLinear`s take the place of linear layers before anything is read; their buffers are named as the checkpoint's
tensors, so that transformers reads those as they are.  The headers of the files say which layers these are, the
quantization_config what their tensors mean.  Nothing is allocated that does not have the size that config.json implies.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from inflight.config import EngineConfig
from inflight.loading.checkpoint import fp8_scheme
from inflight.loading.checkpoint.auto_round_format import AutoRoundFormat
from inflight.loading.checkpoint.awq_format import AwqFormat
from inflight.loading.checkpoint.bitsandbytes_format import BitsAndBytesFormat
from inflight.loading.checkpoint.compressed_format import CompressedFormat
from inflight.loading.checkpoint.gptq_format import GptqFormat
from inflight.loading.checkpoint.tensor_files import TensorFiles, headers_of
from inflight.loading.checkpoint.weights import pretrained
from inflight.loading.load_errors import LoadError
from inflight.loading.quantization.coded_linear import CpuCodes, keeps_codes
from inflight.loading.quantization.int4_linear import Int4Codes, stays_in_codes
from inflight.loading.quantization.packing import Format, Header
from inflight.loading.quantization.schemes import scheme_of
from inflight.loading.quantization.stored_linear import StoredLinear, layer_of

__all__ = ["FORMATS", "load_codes", "load_stored", "without_quantization"]

_log = logging.getLogger(__name__)

FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "auto-round": AutoRoundFormat,
    "awq": AwqFormat,
    "bitsandbytes": lambda values: BitsAndBytesFormat(),
    "compressed-tensors": CompressedFormat,
    "gptq": GptqFormat,
}
_METHOD = "inflight_stored"  # among transformers' methods
_WAY_OUT = 'use another checkpoint of the model, or the unquantized checkpoint with "quantization" in model.json'


def load_stored(
    method: str, config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """The model of a checkpoint of `method`, one of FORMATS, on `device`.

    Raises:
        LoadError: what its configuration or its files contain is not supported, or damaged, by name.
    """
    values = fp8_scheme.quantization(hf_config)
    assert values is not None
    where = f"{config.model!r} ({hf_config.model_type}) cannot be loaded"
    try:
        stored_as = FORMATS[method](values)
    except LoadError as error:
        raise LoadError(f"{where}: {error}; {_WAY_OUT}") from error
    return load_codes(method, config, hf_config, dtype, device, stored_as)


def load_codes(
    method: str,
    config: EngineConfig,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    stored_as: Format,
    state: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """The model on `device`.

    Args:
        method: for the log.
        state: all tensors by name, instead of those of the checkpoint's files.

    Raises:
        LoadError: its files contain something that is not supported, or damaged, by name.
    """
    plainly = msgspec.structs.replace(config, quantization=None)
    asked = _AsStored(stored_as, None if state is None else {name: _header(tensor) for name, tensor in state.items()})
    options = {} if state is None else {"state_dict": state}
    plain = without_quantization(hf_config)
    model = pretrained(
        plainly, plain, dtype, torch.device("cpu"), stored_as.elsewhere, quantization_config=asked, **options
    )
    kept: Int4Codes | CpuCodes | None = None
    if keeps_codes(config, device):
        kept = CpuCodes(dtype)
    elif stays_in_codes(config.quantization, device, dtype):
        kept = Int4Codes(dtype, device, config.check_on_load)
    try:
        dequantised = _place(model, TensorFiles(config.model, config.revision), dtype, kept)
    except LoadError as error:
        raise LoadError(f"{config.model!r} ({hf_config.model_type}) cannot be loaded: {error}") from error
    if kept is not None and kept.count:
        _log.info("%d linear layers of %s stay in the codes of %s", kept.count, config.model, method)
    if dequantised:
        name = str(dtype).removeprefix("torch.")
        _log.info("the %s weights of %d layers of %s are dequantised to %s", method, dequantised, config.model, name)
    return scheme_of(config).place(model, hf_config, device, config.check_on_load).eval().requires_grad_(False)


def without_quantization(hf_config: Any) -> Any:
    """The configuration of the same model with plain weights."""
    plain = copy.deepcopy(hf_config)
    for part in (plain, plain.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return plain


def _header(tensor: Tensor) -> Header:
    return Header("U8" if tensor.dtype == torch.uint8 else str(tensor.dtype), tuple(tensor.shape))


def _place(model: nn.Module, files: TensorFiles, dtype: torch.dtype, kept: Int4Codes | CpuCodes | None) -> int:
    """Replace each `StoredLinear` by the layer that computes its products; returns how many are dequantised.

    Args:
        kept: makes the layers that keep their codes; None if none does.
    """
    dequantised = 0
    for name in [name for name, module in model.named_modules() if isinstance(module, StoredLinear)]:
        stored = model.get_submodule(name)
        assert isinstance(stored, StoredLinear)
        found = files.read(stored.elsewhere.values())
        stored.further = {tensor: found[whole] for tensor, whole in stored.elsewhere.items()}
        weight, bias = stored.coded(), stored.own_bias()
        made = None if kept is None else kept.layer(weight, bias, name)
        dequantised += made is None
        model.set_submodule(name, layer_of(weight, bias, dtype) if made is None else made)
    return dequantised


@register_quantization_config(_METHOD)
class _AsStored(QuantizationConfigMixin):
    """Asks transformers for layers as they are stored."""

    def __init__(self, stored_as: Format, headers: dict[str, Header] | None) -> None:
        """
        Args:
            headers: of all tensors, if they are in no files of transformers'.
        """
        self.quant_method = _METHOD  # type: ignore[assignment]
        self.stored_as, self.headers = stored_as, headers

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": _METHOD}


@register_quantizer(_METHOD)
class _KeepsCodes(HfQuantizer):
    """Replaces linear layers in a model without weights, which transformers then reads."""

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> nn.Module:
        stored_as = self.quantization_config.stored_as
        headers = dict(self.quantization_config.headers or {})
        for file in map(Path, checkpoint_files or []):
            if file.suffix != ".safetensors":
                raise LoadError(f"{file.name} is not in the format of safetensors, which codes must be; convert it")
            headers |= headers_of(file)
        replaced = _replace_linears(model, headers, stored_as)
        if not replaced:
            raise LoadError("none of its linear layers is stored in codes, as its quantization_config says")
        for tied in [name for name in model.all_tied_weights_keys if name.removesuffix(".weight") in replaced]:
            model.config.tie_word_embeddings = False  # the head has a weight of its own, whatever config.json says
            del model.all_tied_weights_keys[tied]
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _replace_linears(model: nn.Module, headers: Mapping[str, Header], stored_as: Format) -> list[str]:
    """Put a `StoredLinear` in the place of each layer with codes; returns the names of these layers.

    Raises:
        LoadError: see `Format` and `Packing`; or codes that belong to no linear layer.
    """
    modules = dict(model.named_modules())
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[str, dict[str, str]] = {}  # layer -> tensor in it -> its name in the files
    for whole in headers:
        layer, tensor = _split(whole, modules, prefix)
        if type(modules[layer]) is nn.Linear:
            found.setdefault(layer, {})[tensor] = whole
        elif whole.rpartition(".")[2] in stored_as.codes:
            _expect_unused(whole, layer, modules[layer])
    replaced = []
    for layer, names in found.items():
        own = {tensor: headers[whole] for tensor, whole in names.items()}
        if (packing := stored_as.packing(layer, own)) is not None:
            with torch.device("meta"):
                made = StoredLinear(layer, modules[layer], packing, own)  # type: ignore[arg-type]
            made.elsewhere = {tensor: names[tensor] for tensor in made.elsewhere}
            model.set_submodule(layer, made)
            replaced.append(layer)
    return replaced


def _split(whole: str, modules: Mapping[str, nn.Module], prefix: str) -> tuple[str, str]:
    """The deepest module on a tensor's path, and the tensor's name in it.

    Args:
        prefix: of the model without its head; the files of some checkpoints omit it, and others add it.
    """
    for name in (whole, f"{prefix}{whole}", whole.removeprefix(prefix)):
        path = name.split(".")
        for length in range(len(path) - 1, 0, -1):
            if (module := ".".join(path[:length])) in modules:
                return module, ".".join(path[length:])
    return "", whole


def _expect_unused(whole: str, name: str, module: nn.Module) -> None:
    """
    Raises:
        LoadError: a tensor of codes belongs to `module`, or to a part of it that is not a linear layer.
    """
    if "." not in name or isinstance(module, nn.ModuleList):
        return  # not of this model, which then ignores it, or is not loaded; such as a layer for further tokens
    what = "experts of a mixture" if "experts" in whole else f"{name}, a {type(module).__name__}"
    raise LoadError(f"{whole} contains codes, which only linear layers can have here, and it belongs to {what}")
