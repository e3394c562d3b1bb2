"""Changes to the logits before the choice: bias, bans, penalties.  Sparse: only touched entries move."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels.gpu.launch import can_launch
from inflight.sampling.metadata import Penalties, SamplingMetadata

__all__ = ["edit_logits"]


def edit_logits(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """float32[R, V] copy of `logits` with bias, then bans, then penalties applied, in vLLM's order."""
    edited = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    flat = edited.view(-1)
    if metadata.bias_index is not None:
        assert metadata.bias_values is not None
        flat[metadata.bias_index] += metadata.bias_values
    if metadata.banned_index is not None:
        flat[metadata.banned_index] = float("-inf")
    if metadata.penalties is not None and can_launch(logits.device):
        from inflight.kernels.gpu import gpu_penalties

        gpu_penalties.penalise(edited, metadata.penalties)
    elif metadata.penalties is not None:
        flat[metadata.penalties.index] = _penalised(flat[metadata.penalties.index], metadata.penalties)
    return edited


def _penalised(logits: Tensor, penalties: Penalties) -> Tensor:
    """Repetition (CTRL, arXiv:1909.05858), then frequency and presence (OpenAI's definition)."""
    repetition, frequency, presence = penalties.strengths[:, penalties.rows]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - frequency * penalties.counts
    return logits - presence * (penalties.counts > 0)
