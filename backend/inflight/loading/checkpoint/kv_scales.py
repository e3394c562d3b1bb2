"""The scales of an fp8 KV pool: from the checkpoint, or calibrated at load; they never change afterwards.

A key or value is stored as `actual / scale` in e4m3, with one scale per layer and KV head for keys, and one for
values.  Whatever exceeds 448 scales saturates.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from inflight.attention.base import AttentionMetadata, KVCache, LayerAttention, LayerSpec, forward_context
from inflight.attention.reference import attend_request
from inflight.config import EngineConfig
from inflight.loading.checkpoint.tensor_files import TensorFiles
from inflight.loading.load_errors import LoadError

__all__ = ["KVScales", "calibrated", "kv_scales"]

_log = logging.getLogger(__name__)

# Tokens of the calibration, at positions 0, 1, ...: enough for the outliers that keys have in fixed channels.
_LENGTH = 512
# Room between the largest number that the calibration sees and the largest in e4m3, for text that goes beyond random
# tokens.  It costs no precision, since e4m3 is a floating-point format: numbers down to 1/7000 of the largest seen keep
# all three bits of mantissa.  On SmolLM2-135M-Instruct, factors from 4 to 256 have KL divergences of 0.012 to 0.014
# nats; with 1, where larger numbers saturate, it is 0.017.
_MARGIN = 4.0
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST = 1e-6  # largest number assumed of a head that is all zero

# Names of scales within an attention module: of compressed-tensors and vLLM now, of ModelOpt, and former ones.
_KEY_NAMES = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_VALUE_NAMES = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")


class KVScales(NamedTuple):
    """Of one layer: float32 [num_kv_heads] each, on the model's device."""

    key: Tensor
    value: Tensor


def kv_scales(
    config: EngineConfig,
    model: nn.Module,
    layers: Sequence[tuple[nn.Module, LayerSpec]],
    text_config: Any,
    max_model_len: int,
) -> list[KVScales] | None:
    """Scales of each layer if the pool is fp8: the checkpoint's where it has them, else calibrated.

    Args:
        layers: `model`'s attention modules; none has its pool yet.
        max_model_len: tokens, at most, of a sequence.

    Raises:
        LoadError: a scale in the checkpoint that cannot be used.
    """
    if config.kv_cache_dtype != "fp8":
        return None
    bos_token_id = getattr(text_config, "bos_token_id", None)
    scales = calibrated(model, layers, text_config.vocab_size, max_model_len, bos_token_id)
    if config.load_format == "dummy" or not _is_fp8(text_config):
        return scales
    files = TensorFiles(config.model, config.revision)
    tensors = files.read(name for name in files.dtypes if name.endswith(_KEY_NAMES + _VALUE_NAMES))
    names = {module: name for name, module in model.named_modules()}
    found = [
        _in_checkpoint(tensors, names[module], spec.num_kv_heads, otherwise)
        for (module, spec), otherwise in zip(layers, scales)
    ]
    count = sum(one is not other for pair, others in zip(found, scales) for one, other in zip(pair, others))
    _log.info("fp8 KV: %d of %d scales are the checkpoint's, the others are calibrated", count, 2 * len(scales))
    return found


def _is_fp8(text_config: Any) -> bool:
    """Whether the checkpoint's scales, if it has any, are for e4m3."""
    values = getattr(text_config, "quantization_config", None)
    scheme = values.get("kv_cache_scheme") if isinstance(values, dict) else None
    return not isinstance(scheme, dict) or (scheme.get("type", "int"), scheme.get("num_bits", 8)) == ("float", 8)


@torch.inference_mode()
def calibrated(
    model: nn.Module,
    layers: Sequence[tuple[nn.Module, LayerSpec]],
    vocab_size: int,
    max_model_len: int,
    bos_token_id: Any,
) -> list[KVScales]:
    """Scales of each layer, from random tokens run through `model` with exact attention and no pool.

    Args:
        layers: see `kv_scales`.
        bos_token_id: the first of the tokens, if the model has one: much attention goes to it.
    """
    device = next(model.parameters()).device
    length = min(_LENGTH, max_model_len)
    token_ids = np.random.default_rng(0).integers(0, vocab_size, length)
    if isinstance(bos_token_id, int) and bos_token_id < vocab_size:
        token_ids[0] = bos_token_id
    observers = [_Observer() for _ in layers]
    for (module, spec), observer in zip(layers, observers):
        module.inflight = LayerAttention(spec, observer, _NO_CACHE)  # type: ignore[assignment]
    try:
        with forward_context(_NO_METADATA, _Observer()):
            model(
                input_ids=torch.from_numpy(token_ids)[None].to(device),
                position_ids=torch.arange(length, device=device)[None],
                use_cache=False,
                logits_to_keep=1,
            )
    finally:
        for module, _ in layers:
            del module.inflight
    return [observer.scales() for observer in observers]


class _Observer:
    """An `AttentionBackend` for one layer and one sequence, which records the largest keys and values of each head."""

    name = "calibration"
    capturable = False

    def __init__(self) -> None:
        self._key = self._value = torch.empty(0)

    def unsupported(self, *_: Any) -> None:
        raise NotImplementedError

    def new_cache(self, *_: Any) -> KVCache:
        raise NotImplementedError

    def prepare(self, metadata: AttentionMetadata) -> None:
        return None

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: Any) -> None:
        self._key, self._value = key, value

    def attend(self, query: Tensor, cache: KVCache, batch: Any, spec: LayerSpec, sinks: Tensor | None) -> Tensor:
        out = attend_request(query, self._key, self._value, spec, sinks)
        self._key, self._value = (x.abs().amax(dim=(0, 2)).float() for x in (self._key, self._value))
        return out

    def scales(self) -> KVScales:
        key, value = (x.clamp_min(_SMALLEST) * (_MARGIN / _LARGEST) for x in (self._key, self._value))
        return KVScales(key, value)


_VOID = torch.empty(0)
_NO_CACHE = KVCache(_VOID, _VOID)
_NO_METADATA = AttentionMetadata(_VOID, _VOID, _VOID, _VOID, [], [], 0, 0, 0)


def _in_checkpoint(tensors: Mapping[str, Tensor], name: str, num_kv_heads: int, otherwise: KVScales) -> KVScales:
    """The scales that a checkpoint has for the attention module `name`; what it lacks is taken from `otherwise`.

    Raises:
        LoadError: a scale that is not positive, or that is neither one number nor one per KV head.
    """

    def read(names: tuple[str, ...], default: Tensor) -> Tensor:
        for key in (f"{name}.{each}" for each in names):
            if key in tensors:
                return _per_head(key, tensors[key], num_kv_heads).to(default.device)
        return default

    return KVScales(read(_KEY_NAMES, otherwise.key), read(_VALUE_NAMES, otherwise.value))


def _per_head(name: str, scale: Tensor, num_kv_heads: int) -> Tensor:
    """float32 [num_kv_heads]"""
    scale = scale.float().flatten()
    if len(scale) not in (1, num_kv_heads):
        raise LoadError(f"{name} has {len(scale)} numbers; a KV scale has one, or one for each of {num_kv_heads} heads")
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise LoadError(f"{name} is {scale.tolist()}; KV scales are positive and finite")
    return scale.expand(num_kv_heads).contiguous()
