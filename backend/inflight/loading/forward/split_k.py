"""Linear layers by the split-K kernel in steps of a few tokens (`kernel_config.split_k`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.loading.load_errors import in_one_line
from inflight.loading.quantization.fp8_linear import decoder_linears

if TYPE_CHECKING:
    from inflight.kernels.gpu.gpu_split_k import Split, Workspace

__all__ = ["split_linears"]

_log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED = 16  # divides the inputs, so that rows are read 16 bytes at a time
_TOLERANCE = 4  # of a product's relative error, in units of the dtype's rounding


@torch.inference_mode()
def split_linears(model: nn.Module, launch_pdl: bool = False, num_sms: int | None = None) -> Callable[[], None] | None:
    """Let the split-K kernel compute the linear layers of the decoder layers that leave a card's SMs idle.

    These are the output and down projections of the llama family, and other layers with few outputs unless they have
    been merged.  Steps of more than 16 tokens, and inputs of another dtype than the weight's, are torch's as before.  A
    product of each size is compared with torch's, which also compiles the kernel; a size that fails is left out, with
    a line in the log.

    Args:
        model: of transformers, on its device.
        launch_pdl: see `gpu_pdl.py`.
        num_sms: defaults to the card's; tests name another.

    Returns:
        A function that undoes it, or None if there is no such layer.
    """
    from inflight.kernels.gpu.gpu_split_k import Workspace, num_sms_of, split_of  # needs the triton package

    hf_config: Any = model.config
    found: list[tuple[nn.Linear, Split]] = []
    for linear in decoder_linears(model, hf_config).values():
        sms = num_sms or num_sms_of(linear.weight.device)
        split = split_of(linear.out_features, linear.in_features, sms)
        if split is not None and _fits(linear):
            found.append((linear, split))
    if not found:
        return None
    workspace = Workspace([(split, linear.out_features) for linear, split in found], found[0][0].weight.device)
    wrong: dict[tuple[Any, ...], str | None] = {}
    replaced: list[nn.Linear] = []
    for linear, split in found:
        kind = tuple(linear.weight.shape), linear.weight.dtype, linear.bias is None
        forward = _forward(linear, split, workspace, launch_pdl)
        if kind not in wrong:
            wrong[kind] = _wrong(forward, linear)
            if wrong[kind] is not None:
                _log.warning("kernel_config: split_k is not used for layers of size %s: %s", list(kind[0]), wrong[kind])
        if wrong[kind] is None:
            linear.forward = forward  # type: ignore[method-assign, assignment]
            replaced.append(linear)
    sizes = ", ".join(str(list(kind[0])) for kind, why in wrong.items() if why is None)
    _log.info("kernel_config: split_k computes %d linear layers, of the sizes %s", len(replaced), sizes or "none")

    def undo() -> None:
        for linear in replaced:
            del linear.forward

    return undo if replaced else None


def _fits(linear: nn.Linear) -> bool:
    """Whether the kernel can compute the layer; a layer whose weight is part of a merged one is computed with that."""
    weight = linear.weight
    is_merged = weight.untyped_storage().nbytes() > weight.nbytes
    return weight.dtype in _DTYPES and linear.in_features % _ALIGNED == 0 and not is_merged


def _forward(linear: nn.Linear, split: Split, workspace: Workspace, launch_pdl: bool) -> Callable[[Tensor], Tensor]:
    """A replacement of the layer's `forward`."""
    from inflight.kernels.gpu.gpu_split_k import MAX_ROWS, split_k_linear  # needs the triton package

    def forward(x: Tensor) -> Tensor:
        rows = x.numel() // linear.in_features
        if not 1 <= rows <= MAX_ROWS or x.dtype != linear.weight.dtype:
            return F.linear(x, linear.weight, linear.bias)
        out = split_k_linear(x.reshape(rows, -1), linear.weight, linear.bias, split, workspace, launch_pdl)
        return out.view(*x.shape[:-1], linear.out_features)

    return forward


def _wrong(forward: Callable[[Tensor], Tensor], linear: nn.Linear) -> str | None:
    """How the products of some rows differ from torch's, or which error they raise; None if they are right."""
    weight = linear.weight
    for rows in (16, 1):
        x = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(0)).to(weight)
        expected = F.linear(x, weight, linear.bias).float()
        try:
            off = ((forward(x).float() - expected).norm() / expected.norm().clamp_min(1e-9)).item()
        except Exception as error:  # of the compiler, or of a launch
            return in_one_line(error)
        if not off <= _TOLERANCE * torch.finfo(weight.dtype).eps:
            return f"the product of {rows} rows differs by {off:.1%} from torch's"
    return None
