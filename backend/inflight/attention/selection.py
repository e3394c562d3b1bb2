"""Attention over the paged KV pool: one Protocol, several kernels."""

from __future__ import annotations

import logging

import torch

from inflight.attention.base import AttentionBackend, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.kernels.cpu.attention import CpuAttention
from inflight.kernels.gpu.gpu_attention import GpuAttention, interpreted
from inflight.kernels.gpu.gpu_flashinfer import FlashInferAttention

__all__ = ["select_backend"]

_log = logging.getLogger(__name__)

_BACKENDS: dict[str, type[AttentionBackend]] = {
    ReferenceAttention.name: ReferenceAttention,
    CpuAttention.name: CpuAttention,
    GpuAttention.name: GpuAttention,
    FlashInferAttention.name: FlashInferAttention,
}
# The first one that runs all of a model's layers is taken by "auto".
_PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "reference"), "cuda": ("triton", "reference")}
_ON_GPUS = (GpuAttention.name, FlashInferAttention.name)
# What the reference kernel costs.  On a CPU as measured by bench/cpu_attention.py --reference.
_COST = {
    "cpu": "6 to 15 times slower in decode and 1.4 to 3 times in prefill",
    "cuda": "one request after the other, each layer, with a copy of its keys and values",
}


def select_backend(
    name: str, specs: list[LayerSpec], dtype: torch.dtype, block_size: int, device: torch.device
) -> AttentionBackend:
    """The kernel called `name`, or for "auto" the best one that runs every layer in `specs`.

    Raises:
        ConfigError: no such kernel, none for this device, or it lacks a feature that a layer needs (named).
    """
    if name != "auto" and name not in _BACKENDS:
        known = ", ".join(["auto", *_BACKENDS])
        raise _config_error(f"attention_backend={name!r} is not known: allowed are {known}")
    if name == CpuAttention.name and device.type != "cpu":
        raise _config_error(f"attention_backend={name!r} runs on a CPU, not on {device.type}: use 'auto'")
    if name in _ON_GPUS and device.type == "cpu" and not interpreted():
        raise _config_error(
            f"attention_backend={name!r} runs on a CUDA device, not on {device.type} (save for tests, with "
            "TRITON_INTERPRET=1): use 'auto'"
        )
    missing = ""
    for candidate in _PREFERENCE[device.type] if name == "auto" else (name,):
        backend = _BACKENDS[candidate]()
        lacks = {backend.unsupported(spec, dtype, block_size) for spec in specs} - {None}
        if not lacks:
            if candidate == ReferenceAttention.name and name == "auto":
                first, cost = _PREFERENCE[device.type][0], _COST[device.type]
                _log.warning("attention runs on the reference kernel, %s: the %s kernel lacks %s", cost, first, missing)
            return backend
        missing = ", ".join(sorted(str(lack) for lack in lacks))
    advice = "" if name == "auto" else "; use 'auto'"
    raise _config_error(f"attention_backend={name!r} cannot run this checkpoint: it lacks {missing}{advice}")


def _config_error(message: str) -> Exception:
    from inflight.config import ConfigError  # needs more than torch, which is all that kernels do

    return ConfigError(message)
