"""The choice of kernels: attention, the small operations around it, and sampling.

The one place that knows all of them.  `attention/`, `ops/` and `sampling/` define the Protocols and the reference
implementations, and import no kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from inflight.attention.base import AttentionBackend, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.kernels.cpu import library
from inflight.kernels.cpu.cpu_attention import CpuAttention
from inflight.kernels.cpu.cpu_sampler import CpuSampling
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_flash3 import Flash3Attention
from inflight.kernels.gpu.gpu_varlen import VarlenAttention
from inflight.kernels.gpu.launch import can_launch, interpreted, unavailable
from inflight.ops.base import FusedOps
from inflight.ops.block_fp8 import BlockFp8Ops
from inflight.ops.experts import ExpertOps
from inflight.ops.int4 import Int4Ops, ReferenceInt4
from inflight.ops.lora import LoraOps, ReferenceLora
from inflight.ops.reference_ops import ReferenceOps
from inflight.sampling.ops import SamplingOps
from inflight.sampling.reference_sampling import ReferenceSampling

if TYPE_CHECKING:
    from inflight.kernel_config import KernelConfig

__all__ = [
    "check_switches",
    "no_int4",
    "select_attention",
    "select_block_fp8",
    "select_experts",
    "select_int4",
    "select_lora",
    "select_ops",
    "select_sampling",
]
_log = logging.getLogger(__name__)

_BACKENDS: dict[str, type[AttentionBackend]] = {
    ReferenceAttention.name: ReferenceAttention,
    CpuAttention.name: CpuAttention,
    GpuAttention.name: GpuAttention,
    Flash3Attention.name: Flash3Attention,
}
_OLDER_NAMES = {"triton": GpuAttention.name}
# "auto" selects the first one that supports all of a model's layers.
_PREFERENCE = {
    "cpu": (CpuAttention.name, ReferenceAttention.name),
    "cuda": (GpuAttention.name, ReferenceAttention.name),
}
_GPU_ONLY = (GpuAttention.name, Flash3Attention.name)
_REMOVED = {
    "flashinfer": "its plan is made on the host in every step, which a CUDA graph cannot capture",
}
_MIN_PDL_CAPABILITY = (9, 0)
# The cost of the reference kernel.  On a CPU as measured by bench/cpu_attention.py --reference.
_COST = {
    "cpu": "6 to 15 times slower in decode and 1.4 to 3 times slower in prefill",
    "cuda": "which processes requests one by one and copies their keys and values in each layer",
}


def select_attention(
    name: str,
    specs: list[LayerSpec],
    dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    kernels: KernelConfig | None = None,
) -> AttentionBackend:
    """The kernel called `name`, or for "auto" the best one that supports every layer in `specs`.

    Args:
        kernels: switches; None: all are off.

    Raises:
        ConfigError: no such kernel, not for this device, or a feature that it does not support (named).
    """
    name = _OLDER_NAMES.get(name, name)
    if name in _REMOVED:
        raise _config_error(
            f"attention_backend={name!r} was removed: {_REMOVED[name]}; use 'auto', or {Flash3Attention.name!r} for "
            "long prompts on a Hopper card"
        )
    if name != "auto" and name not in _BACKENDS:
        raise _config_error(f"attention_backend={name!r} is not one of {', '.join(['auto', *_BACKENDS])}")
    if name == CpuAttention.name and device.type != "cpu":
        raise _config_error(f"attention_backend={name!r} runs on a CPU, not on {device.type}; use 'auto'")
    if name in _GPU_ONLY and device.type == "cpu" and not interpreted():
        raise _config_error(f"attention_backend={name!r} runs on a CUDA device, not on {device.type}; use 'auto'")
    backends, reasons = _backends(name, kernels), ""
    for candidate in _PREFERENCE[device.type] if name == "auto" else (name,):
        backend = backends[candidate]()
        unsupported = {backend.unsupported(spec, dtype, block_size) for spec in specs} - {None}
        if not unsupported:
            if candidate == ReferenceAttention.name and name == "auto":
                best, cost = _PREFERENCE[device.type][0], _COST[device.type]
                _log.warning(
                    "using the reference attention kernel, %s; the %s kernel is unavailable: %s", cost, best, reasons
                )
            return backend
        reasons = ", ".join(sorted(map(str, unsupported)))
    advice = "" if name == "auto" else "; use 'auto'"
    raise _config_error(f"attention_backend={name!r} does not support this checkpoint here: {reasons}{advice}")


def _backends(name: str, kernels: KernelConfig | None) -> Mapping[str, Callable[[], AttentionBackend]]:
    """The kernels that names stand for under these switches."""
    if kernels is None:
        return _BACKENDS
    if kernels.varlen_attention and name not in ("auto", GpuAttention.name):
        raise _config_error(
            f"kernel_config: varlen_attention belongs to attention_backend={GpuAttention.name!r}, not to {name!r}; "
            "remove one of them"
        )
    gpu = VarlenAttention if kernels.varlen_attention else GpuAttention
    switched = {kind.name: partial(kind, launch_pdl=kernels.launch_pdl) for kind in (gpu, Flash3Attention)}
    return {**_BACKENDS, **switched}


def check_switches(kernels: KernelConfig, device: torch.device) -> None:
    """
    Raises:
        ConfigError: a switch is on, and `device` cannot run its kernel.
    """
    if device.type == "cpu" and not interpreted():
        why: str | None = "the device is a CPU"
    else:
        why = unavailable()
    if kernels.switches and why is not None:
        raise _config_error(
            f"kernel_config: {', '.join(kernels.switches)} cannot be used, because its kernels are a GPU's: {why}; "
            "remove it"
        )
    if kernels.launch_pdl and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_PDL_CAPABILITY:
            have, need = (".".join(map(str, version)) for version in (capability, _MIN_PDL_CAPABILITY))
            raise _config_error(
                f"kernel_config: launch_pdl needs a GPU of compute capability {need} or later, and this one has {have};"
                " remove it"
            )


def _config_error(message: str) -> Exception:
    from inflight.config import ConfigError  # needs msgspec; kernels need only torch

    return ConfigError(message)


def select_ops(device: torch.device, launch_pdl: bool = False) -> FusedOps:
    """The fastest small operations for `device`; `ReferenceOps` if it has no kernels."""
    if can_launch(device):
        from inflight.kernels.gpu.gpu_ops import GpuOps  # needs the triton package

        return GpuOps(launch_pdl)
    return ReferenceOps()


def select_block_fp8() -> BlockFp8Ops:
    """The kernel of block-scaled fp8 weights, where `check_switches` has found that it can run."""
    from inflight.kernels.gpu.gpu_block_fp8 import GpuBlockFp8  # needs the triton package

    return GpuBlockFp8()


def no_int4() -> str | None:
    """Why the GPU that there is has no kernels for weights in four bits; None if it has."""
    return unavailable()


def select_int4(device: torch.device) -> Int4Ops:
    """The products with weights in four bits on `device`, for the layers of one model; torch's if it has no kernels."""
    if can_launch(device):
        from inflight.kernels.gpu.gpu_int4 import GpuInt4  # needs the triton package

        return GpuInt4()
    return ReferenceInt4()


def select_lora(device: torch.device) -> LoraOps:
    """The products of adapters on `device`, for the layers of one model; torch's if it has no kernels."""
    if can_launch(device):
        from inflight.kernels.gpu.gpu_lora import GpuLora  # needs the triton package

        return GpuLora()
    return ReferenceLora()


def select_experts() -> ExpertOps:
    """The kernels of experts, where `check_switches` has found that they can run."""
    from inflight.kernels.gpu.gpu_experts import GpuExperts  # needs the triton package

    return GpuExperts()


def select_sampling(device: torch.device) -> SamplingOps:
    """The fastest operations on logits on `device`; `ReferenceSampling` if it has no kernels."""
    if can_launch(device):
        from inflight.kernels.gpu.gpu_sampling import GpuSampling  # needs the triton package

        return GpuSampling()
    return CpuSampling() if device.type == "cpu" and library.unavailable() is None else ReferenceSampling()
