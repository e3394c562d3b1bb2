"""Quantized checkpoints: how each `quant_method` is served, or why it is not.

transformers loads a checkpoint of a method that it does not know with a warning, as if its weights were plain numbers:
what it then serves is noise.  Here a method is in `LOADERS`, or it is refused before any weights are read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from inflight.config import STORED, ConfigError, EngineConfig
from inflight.loading.checkpoint import fp8_scheme
from inflight.loading.checkpoint.compressed_format import has_integers
from inflight.loading.checkpoint.fp8_checkpoint import METHODS, load_fp8
from inflight.loading.checkpoint.gguf_checkpoint import load_gguf
from inflight.loading.checkpoint.mxfp4_checkpoint import load_mxfp4
from inflight.loading.checkpoint.stored_checkpoint import FORMATS, load_stored
from inflight.loading.checkpoint.weights import dummy_weights, pretrained
from inflight.loading.load_errors import LoadError

__all__ = ["LOADERS", "Loader", "loader_of"]

# (config, transformers' configuration, dtype, device) -> the model on the device, ready to run.
Loader = Callable[[EngineConfig, Any, torch.dtype, torch.device], nn.Module]

_WAY_OUT = (
    'use the model\'s unquantized checkpoint, with "quantization" in model.json to quantize its weights while loading'
)


def _load_compressed(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Of weights in fp8, or of integers."""
    try:
        integers = has_integers(fp8_scheme.quantization(hf_config) or {})
    except LoadError as error:
        raise LoadError(f"{config.model!r} ({hf_config.model_type}) cannot be loaded: {error}; {_WAY_OUT}") from error
    if integers:
        return load_stored(_COMPRESSED, config, hf_config, dtype, device)
    return load_fp8(config, hf_config, dtype, device)


_COMPRESSED = "compressed-tensors"
LOADERS: dict[str, Loader] = {
    "gguf": load_gguf,
    "mxfp4": load_mxfp4,
    **dict.fromkeys(METHODS, load_fp8),
    **{method: partial(load_stored, method) for method in FORMATS},
    _COMPRESSED: _load_compressed,
}


def loader_of(config: EngineConfig, hf_config: Any) -> Loader:
    """The function that loads the checkpoint.

    Raises:
        LoadError: it is quantized by a method that is not served; the message names it.
        ConfigError: `quantization` names another one.
    """
    method = quant_method(hf_config)
    _expect_named(config, method)
    if config.load_format == "dummy":
        return dummy_weights
    if method is None:
        return pretrained
    if method in LOADERS:
        return LOADERS[method]
    known = method in AUTO_QUANTIZATION_CONFIG_MAPPING or method == "bitsandbytes"
    why = (
        "which transformers serves with kernels of other packages, and Inflight does not"
        if known
        else "which is unknown here"
    )
    raise LoadError(
        f"{config.model!r} ({hf_config.model_type}) is quantized by quant_method={method!r}, {why}; served are "
        f"{', '.join(sorted(LOADERS))}; {_WAY_OUT}"
    )


def _expect_named(config: EngineConfig, method: str | None) -> None:
    """
    Raises:
        ConfigError: `quantization` names how a checkpoint is stored, and this one is stored in another way.
    """
    asked = config.quantization
    if asked not in STORED or asked == method:
        return
    if method is None:
        raise ConfigError(
            f"quantization={asked!r} names how a checkpoint is stored, and {config.model!r} is not quantized; remove "
            'it, or set it to "int4", or to "int8" (on a CPU) or "fp8" (on a GPU), to quantize weights while loading'
        )
    raise ConfigError(f"quantization={asked!r}, but {config.model!r} has quant_method={method!r}; remove it")


def quant_method(hf_config: Any) -> str | None:
    """`quant_method` of config.json; None if the checkpoint is not quantized."""
    found = getattr(hf_config, "quantization_config", None)
    if found is None:
        found = getattr(hf_config.get_text_config(decoder=True), "quantization_config", None)
    if found is None:
        return None
    values = found if isinstance(found, dict) else found.to_dict()
    if values.get("load_in_8bit") or values.get("load_in_4bit"):
        return "bitsandbytes"
    method = values.get("quant_method")
    return "unnamed" if method is None else str(getattr(method, "value", method))
