"""A mixture's experts by `ExpertOps` (`kernel_config.fused_experts`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from inflight.loading.load_errors import LoadError, in_one_line
from inflight.loading.quantization.mxfp4_experts import Mxfp4Experts
from inflight.ops.experts import ExpertOps, ExpertProducts, ExpertWeights, SwiGlu

__all__ = ["fuse_experts"]

_log = logging.getLogger(__name__)

_PROBE_ROWS = 4


@torch.inference_mode()
def fuse_experts(model: Any, ops: ExpertOps, passes: Callable[[], bool]) -> None:
    """Let `ops` compute the experts of `model`, which is on its device, in place; compiles what steps will launch.

    Experts that it does not support stay as they are, with a line in the log.

    Args:
        passes: whether the model's logits are right; if not, plain experts become transformers' again.

    Raises:
        LoadError: experts that are kept in four bits, which nothing else computes at speed, cannot be computed.
    """
    name = type(model).__name__
    packed = any(isinstance(module, Mxfp4Experts) for module in model.modules())
    fused: list[nn.Module] = []
    try:
        reasons = {why for module in model.modules() if (why := _fuse(module, model.dtype, ops, fused)) is not None}
        if fused and not passes():
            reasons.add("they compute other logits")
            _undo(fused)
    except Exception as error:  # of the compiler, or of a launch
        _undo(fused)
        reasons = {in_one_line(error)}
    if packed and reasons:
        raise LoadError(
            f"kernel_config: fused_experts does not work here: {'; '.join(sorted(reasons))}; remove it, and the "
            "experts in MXFP4 are unpacked"
        )
    if reasons:
        _log.warning("kernel_config: experts of %s run through transformers: %s", name, "; ".join(sorted(reasons)))
    _log.info("kernel_config: fused_experts computes %d layers of %s", len(fused), name)


def _undo(fused: list[nn.Module]) -> None:
    for module in fused:
        del module.forward
    fused.clear()


def _fuse(module: nn.Module, dtype: torch.dtype, ops: ExpertOps, fused: list[nn.Module]) -> str | None:
    """Replace the forward of `module` if it is a mixture's experts; returns why it could not."""
    found = module.products if isinstance(module, Mxfp4Experts) else _plain_experts(module)
    if found is None or isinstance(found, str):
        return found
    if (why := ops.unsupported(found, dtype)) is not None:
        return why
    ops.prepare(found, dtype)
    module.forward = _forward(ops, found)
    fused.append(module)
    return None


def _forward(ops: ExpertOps, experts: ExpertProducts) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return ops.experts(hidden_states, experts, top_k_index, top_k_weights)

    return forward


def _plain_experts(module: Any) -> ExpertProducts | str | None:
    """The products of a module that implements transformers' ExpertsInterface; None for others, or why they differ."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "_apply_gate"):
        return None
    name = type(module).__name__
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has no such norms
        return f"{name} has {'a norm after each expert' if module.has_gate else 'no gates'}"
    gate_up, down = (_weights(module, part) for part in ("gate_up_proj", "down_proj"))
    if (gate := _gate_of(module, gate_up.num_outputs)) is None:
        return f"{name} has a gate of its own"
    return ExpertProducts(gate_up, down, gate)


def _weights(module: Any, name: str) -> ExpertWeights:
    values = getattr(module, name).data
    bias = getattr(module, f"{name}_bias").data if module.has_bias else None
    return ExpertWeights(values.transpose(1, 2) if module.is_transposed else values, None, bias)


def _gate_of(module: Any, num_outputs: int) -> SwiGlu | None:
    """The gate that computes what the module's does, as a few numbers show; None if there is none."""
    gate = SwiGlu(True, module.limit, module.alpha) if isinstance(module, GptOssExperts) else SwiGlu()
    x = 20 * torch.randn(_PROBE_ROWS, num_outputs, generator=torch.Generator().manual_seed(0))
    return gate if torch.allclose(gate(x), module._apply_gate(x), rtol=1e-5, atol=1e-5) else None
