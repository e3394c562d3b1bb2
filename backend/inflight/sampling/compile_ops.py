"""Compiles a device's sampling operations before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import mask_words
from inflight.sampling.metadata import SampleRow
from inflight.sampling.ops import SamplingOps
from inflight.sampling.rules import RULES, LogitsRule
from inflight.sampling.sampler import Sampler
from inflight.sampling.table import sampling_metadata

__all__ = ["compile_ops"]


def compile_ops(
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: SamplingOps,
    rules: Sequence[type[LogitsRule]] = RULES,
) -> None:
    """Call `ops` and the kernels of `rules` for logits[R, vocab_size] of `dtype`, so that no request waits for them."""
    if not ops.compiles:
        return
    sampler = Sampler()
    params = [SamplingParams(top_k=2), *(rule.warm_up_params for rule in rules)]
    token = np.zeros(1, dtype=np.int32)
    rows = [SampleRow(p, seed=0, position=1, prompt_token_ids=token, output_token_ids=token[:0]) for p in params]
    logits = torch.zeros(len(rows), vocab_size, dtype=dtype, device=device)
    metadata = sampling_metadata(rows, vocab_size, device, rules, ops)
    sampler(logits, metadata)  # edits are made to a float32 copy
    sampler(logits, replace(metadata, edits=[]))
    bitmask = np.full((1, mask_words(vocab_size)), -1, dtype=np.int32)
    ops.mask(logits.float(), np.zeros(1, dtype=np.int64), bitmask)  # not all vocabularies have grammars
