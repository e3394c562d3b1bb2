"""Sampling tables as the engine makes them: with the kernels that this machine has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inflight.kernels import registry
from inflight.sampling import SampleRow, SamplingMetadata, SamplingTable, sampling_metadata
from inflight.sampling.rules import RULES, LogitsRule

__all__ = ["describe", "new_table"]


def new_table(
    max_num_seqs: int,
    vocab_size: int,
    device: torch.device | str = "cpu",
    rules: Sequence[type[LogitsRule]] = RULES,
) -> SamplingTable:
    """See `SamplingTable`."""
    return SamplingTable(max_num_seqs, vocab_size, device, rules, registry.select_sampling(torch.device(device)))


def describe(
    rows: Sequence[SampleRow],
    vocab_size: int,
    device: torch.device | str = "cpu",
    rules: Sequence[type[LogitsRule]] = RULES,
) -> SamplingMetadata:
    """See `sampling_metadata`."""
    return sampling_metadata(rows, vocab_size, device, rules, registry.select_sampling(torch.device(device)))
