"""Choosing every row's token on a CPU in one call, by `cpu_sampler_kernels.cpp`.

A row's token is a function of its logits, parameters, seed and position alone, whatever the batch and the number of
threads.  It differs from what `sampling/choose.py` draws, and the GPU's kernel, only if two scores, or a mass and its
bound, agree to about 1 part in 10**7.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from inflight.kernels.cpu.library import library
from inflight.sampling.noise import token_hashes
from inflight.sampling.reference_sampling import ReferenceSampling

__all__ = ["CpuSampling", "choose"]

_LOGITS_PER_THREAD = 2**16  # below this another thread is not worth waking


class _Draws(ctypes.Structure):
    """`Draws` of cpu_sampler.h."""

    _fields_ = [
        ("logits", c_void_p),
        ("stride", c_int64),
        ("size", c_int64),
        ("columns", c_void_p),
        ("line", c_int64),
        ("hashes", c_void_p),
        ("out", c_void_p),
        ("masks", c_void_p),
        ("mask_words", c_int64),
        ("marks", c_int32),
    ]


def choose(logits: Tensor, columns: Tensor, marks: bool = True, bitmask: np.ndarray | None = None) -> Tensor:
    """int64[R]: one token per row of `logits[R, V]`.

    Args:
        columns: int64[COLUMN_LINES, C], see `SamplingMetadata.columns`; names rows at most once; others get token 0.
        marks: give `unusable.NO_TOKEN` to rows whose largest logit is not finite; False if masks may have made it so,
            or with a `bitmask`, if the caller knows these rows: then few logits are read.
        bitmask: int32[C, mask_words(V)]: each column's allowed tokens, the first in the lowest bit.  A row that it
            leaves without a token gets token 0.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        logits = logits.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    columns = columns.contiguous()
    bitmask = None if bitmask is None else np.ascontiguousarray(bitmask)
    out = np.zeros(len(logits), dtype=np.int64)
    hashes = token_hashes(logits.shape[-1], logits.device)
    draws = _Draws(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[-1],
        columns.data_ptr(),
        columns.stride(0),
        hashes.data_ptr(),
        out.ctypes.data,
        None if bitmask is None else bitmask.ctypes.data,
        0 if bitmask is None else bitmask.shape[1],
        marks,
    )
    count = columns.shape[1]
    threads = max(1, min(torch.get_num_threads(), count, count * logits.shape[-1] // _LOGITS_PER_THREAD))
    library().inflight_sampler_choose(ctypes.byref(draws), count, threads)
    return torch.from_numpy(out)


class CpuSampling(ReferenceSampling):
    """A `SamplingOps` that chooses tokens by the compiled kernel."""

    draws = True
    draws_masked = True

    def choose(self, logits: Tensor, columns: Tensor, marks: bool = True, bitmask: np.ndarray | None = None) -> Tensor:
        return choose(logits, columns, marks, bitmask)
