"""One layer's attention to a batch, as the benchmarks of the kernels need it: metadata, bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata, LayerSpec


def scattered_blocks(seq_lens: Sequence[int], block_size: int) -> Tensor:
    """int32 [requests, most blocks of one]: a block table whose requests have blocks scattered over the pool."""
    blocks = [-(-length // block_size) for length in seq_lens]
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, chosen in enumerate(torch.randperm(sum(blocks), dtype=torch.int32).split(blocks)):
        table[row, : len(chosen)] = chosen
    return table


def metadata_of(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    table: Tensor,
    block_size: int,
    device: str | torch.device = "cpu",
) -> AttentionMetadata:
    """Requests of `seq_lens` tokens in the blocks of `table`; the last `query_lens` tokens are new."""
    query_start_loc = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    slots = []
    for row, (length, count) in enumerate(zip(seq_lens, query_lens)):
        positions = torch.arange(length - count, length)
        slots.append(table[row, positions // block_size].long() * block_size + positions % block_size)
    return AttentionMetadata(
        query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.cat(slots).to(device),
        query_start_loc_cpu=query_start_loc,
        seq_lens_cpu=list(seq_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_size=block_size,
    )


def flops_of(spec: LayerSpec, seq_lens: Sequence[int], query_lens: Sequence[int]) -> int:
    """FLOPs of the causal products of queries and keys, and of weights and values."""
    pairs = sum(count * (n - count) + count * (count + 1) // 2 for n, count in zip(seq_lens, query_lens))
    return 2 * spec.num_heads * (spec.key_head_size + spec.value_head_size) * pairs
