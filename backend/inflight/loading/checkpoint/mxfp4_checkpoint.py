"""Checkpoints of gpt-oss, whose experts are stored in MXFP4: unpacked while loading, or kept in four bits.

transformers unpacks them.  With `kernel_config.fused_experts`, `Mxfp4Experts` take the place of its experts before
anything is read; their parameters are named as the checkpoint's, so that its tensors are read as they are.

Format: https://github.com/openai/gpt-oss, https://huggingface.co/docs/transformers/quantization/mxfp4
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn
from transformers import Mxfp4Config
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from inflight.config import EngineConfig
from inflight.loading.checkpoint.weights import pretrained
from inflight.loading.load_errors import LoadError
from inflight.loading.quantization.mxfp4_experts import Mxfp4Experts, stays_packed

__all__ = ["load_mxfp4"]

_log = logging.getLogger(__name__)

_METHOD = "inflight_mxfp4"  # among transformers' methods
_NAN = 255  # code of E8M0


def load_mxfp4(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model of a checkpoint with experts in MXFP4, on `device`.

    Raises:
        LoadError: transformers cannot load it; or it stays packed, and a scale is not a number.
    """
    if not stays_packed(config, dtype):
        if config.kernel_config.fused_experts:
            _log.warning("experts in MXFP4 are unpacked: the kernel needs dtype bfloat16 or float16, not %s", dtype)
        model = pretrained(config, hf_config, dtype, device, quantization_config=Mxfp4Config(dequantize=True))
        for module in model.modules():
            if isinstance(module, GptOssExperts):
                module.to(dtype)  # transformers 5.17 unpacks to bfloat16, whatever it is asked for
        return model
    plain = copy.deepcopy(hf_config)
    del plain.quantization_config
    model = pretrained(config, plain, dtype, device, quantization_config=_AsStored())
    for name, module in model.named_modules():
        if isinstance(module, Mxfp4Experts) and _has_nan(module):
            raise LoadError(
                f"{config.model!r} ({hf_config.model_type}) cannot be loaded: a scale of {name} is not a number "
                f"(code {_NAN}); download the checkpoint again"
            )
    return model


def _has_nan(module: Mxfp4Experts) -> bool:
    return any(bool((scales == _NAN).any()) for scales in (module.gate_up_proj_scales, module.down_proj_scales))


@register_quantization_config(_METHOD)
class _AsStored(QuantizationConfigMixin):
    """Asks transformers for experts in four bits."""

    def __init__(self) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]


@register_quantizer(_METHOD)
class _KeepsExperts(HfQuantizer):
    """Replaces experts in a model without weights, which transformers then reads."""

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        names = [name for name, module in model.named_modules() if isinstance(module, GptOssExperts)]
        for name in names:
            with torch.device("meta"):
                model.set_submodule(name, Mxfp4Experts.in_place_of(model.get_submodule(name)))
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
