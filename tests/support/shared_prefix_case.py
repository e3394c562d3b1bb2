"""Requests that begin like others: in the same blocks, or each in blocks of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from paged_case import PagedCase
from torch import Tensor

from inflight.attention.base import AttentionMetadata
from inflight.kernels.cpu.cpu_attention import CpuAttention


def metadata_of(seq_lens: list[int], query_lens: list[int], table: Tensor, block_size: int) -> AttentionMetadata:
    """Of requests with these blocks, as far as a plan of the kernel looks at it: no slots are written."""
    query_start_loc = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    return AttentionMetadata(
        query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        query_start_loc_cpu=query_start_loc,
        seq_lens_cpu=seq_lens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_size=block_size,
    )


@dataclass
class SharedPrefixCase(PagedCase):
    """
    Attributes:
        parents: of each request: an earlier one, and the number of its first blocks that are this one's, too.
    """

    parents: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for request, (parent, blocks) in enumerate(self.parents):
            tokens = blocks * self.block_size
            assert tokens <= min(self.seq_lens[parent], self.seq_lens[request] - self.query_lens[request])
            for rows in (self.keys, self.values):
                rows[request][:tokens] = rows[parent][:tokens]

    def shared(self, backend: CpuAttention) -> Any:
        """The step's batch with one copy of what requests have in common."""
        metadata = self.metadata(self.query_lens)
        for request, (parent, blocks) in enumerate(self.parents):
            metadata.block_table[request, :blocks] = metadata.block_table[parent, :blocks]
        return backend.prepare(metadata)

    def both(self, threads: int = 1) -> tuple[Tensor, Tensor]:
        """The results with the shared blocks, and with blocks of each request's own: [tokens, heads, value size]."""
        backend = CpuAttention()
        cache = self.filled_cache(backend)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            batches = (self.shared(backend), self.prepared(backend))
            one, other = (backend.attend(self.query, cache, batch, self.spec, self.sinks) for batch in batches)
        finally:
            torch.set_num_threads(before)
        return one, other

    def keys_read(self, threads: int = 1) -> tuple[int, int]:
        """Keys, times KV heads, that the kernel passes over: with the shared blocks, and without."""
        backend = CpuAttention()
        cache = backend.new_cache(1, self.block_size, self.spec, self.dtype, torch.device("cpu"))
        counts = [backend.keys_read(cache, batch, threads) for batch in (self.shared(backend), self.prepared(backend))]
        return counts[0], counts[1]
