"""Masks of grammars on logits: in torch and by the kernel, both as the bits say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from inflight.grammars.base import mask_words
from inflight.kernels.gpu import gpu_bitmask
from inflight.kernels.gpu.gpu_sampling import GpuSampling
from inflight.sampling.reference_sampling import ReferenceSampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("kernel", [False, True])
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(vocab=st.sampled_from([1, 31, 32, 33, 100, 257]), count=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_bits_that_are_0_become_minus_infinity(monkeypatch, kernel: bool, vocab: int, count: int, seed: int) -> None:
    monkeypatch.setattr(gpu_bitmask, "_BLOCK", 64)
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(5, count, replace=False)).astype(np.int64)
    bitmask = rng.integers(-(2**31), 2**31, (count, mask_words(vocab)), dtype=np.int64).astype(np.int32)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(seed))
    expected = logits.clone()
    for row, words in zip(rows.tolist(), bitmask.tolist()):
        for token in range(vocab):
            if not words[token // 32] >> token % 32 & 1:
                expected[row, token] = -torch.inf
    edited = logits.clone().to(DEVICE if kernel else "cpu")
    (GpuSampling() if kernel else ReferenceSampling()).mask(edited, rows, bitmask)
    assert torch.equal(edited.cpu(), expected)
