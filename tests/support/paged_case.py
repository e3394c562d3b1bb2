"""One attention layer on a ragged batch, for any backend: pool, block tables, queries."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inflight.attention.base import AttentionBackend, AttentionMetadata, KVCache, LayerSpec

VOID = 2**30  # block id of undefined table entries, which must not be used


def strided(
    shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator, layout: str, device: str = "cpu"
) -> Tensor:
    """Random [tokens, heads, size] in one of the layouts that models pass to attention."""

    def random_numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    tokens, heads, size = shape
    if layout == "heads first":  # after rotary: [1, heads, tokens, size], transposed
        return random_numbers(heads, tokens, size).transpose(0, 1)
    if layout == "fused":  # a slice of one projection's rows
        rows = random_numbers(tokens, 3 * heads * size + 8)
        return rows[:, heads * size + 8 : 2 * heads * size + 8].unflatten(1, (heads, size))
    if layout == "size strided":
        return random_numbers(tokens, size, heads).transpose(1, 2)
    return random_numbers(tokens, heads, size)


@dataclass
class PagedCase:
    """Requests of `seq_lens` tokens; the last `query_lens` are the queries of the step."""

    spec: LayerSpec
    seq_lens: list[int]
    query_lens: list[int]
    block_size: int
    dtype: torch.dtype = torch.float32
    layout: str = "heads first"
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        generator, spec = torch.Generator().manual_seed(self.seed), self.spec

        def each_request(heads: int, size: int) -> list[Tensor]:
            shapes = [(n, heads, size) for n in self.seq_lens]
            return [strided(shape, self.dtype, generator, self.layout, self.device) for shape in shapes]

        self.keys = each_request(spec.num_kv_heads, spec.key_head_size)
        self.values = each_request(spec.num_kv_heads, spec.value_head_size)
        queries = each_request(spec.num_heads, spec.key_head_size)
        # A request's queries do not depend on how many of them are new.
        last = [query[n - count :] for query, n, count in zip(queries, self.seq_lens, self.query_lens)]
        self.query = last[0] if len(last) == 1 else torch.cat(last)
        self.sinks = torch.randn(spec.num_heads, generator=generator).to(self.device) if spec.has_sinks else None

    def with_dtype(self, dtype: torch.dtype) -> PagedCase:
        """The same numbers in another dtype."""
        other = replace(self, dtype=dtype)
        other.keys = [key.to(dtype) for key in self.keys]
        other.values = [value.to(dtype) for value in self.values]
        other.query = self.query.to(dtype)
        other.sinks = self.sinks
        return other

    def on(self, device: str) -> PagedCase:
        """The same numbers on another device."""
        other = replace(self, device=device)
        other.keys = [key.to(device) for key in self.keys]
        other.values = [value.to(device) for value in self.values]
        other.query = self.query.to(device)
        other.sinks = None if self.sinks is None else self.sinks.to(device)
        return other

    def run(self, backend: AttentionBackend) -> Tensor:
        """Write everything into a pool full of NaN, then attend: [sum of query_lens, num_heads, value size]."""
        return self.attend(backend, self.filled_cache(backend))

    def attend(self, backend: AttentionBackend, cache: KVCache) -> Tensor:
        # Makes torch fill uninitialised tensors with NaN.
        torch.use_deterministic_algorithms(True)
        try:
            return backend.attend(self.query, cache, self.prepared(backend), self.spec, self.sinks)
        finally:
            torch.use_deterministic_algorithms(False)

    def prepared(self, backend: AttentionBackend) -> Any:
        """The step's batch as the backend's `attend` takes it."""
        return backend.prepare(self.metadata(self.query_lens))

    def filled_cache(self, backend: AttentionBackend) -> KVCache:
        """A pool full of NaN to which all keys and values are written."""
        num_blocks = sum(self._blocks(n) for n in self.seq_lens) + 2
        cache = backend.new_cache(num_blocks, self.block_size, self.spec, self.dtype, torch.device(self.device))
        for scale, rows in ((cache.key_scale, self.keys), (cache.value_scale, self.values)):
            if scale is not None:  # an fp8 pool, as if calibrated with these keys and values
                scale.copy_(torch.cat(rows).abs().amax(dim=(0, 2)).float() * (4 / 448))
        for pool in (cache.key, cache.value):
            pool.fill_(torch.nan if pool.is_floating_point() else -1)  # which is NaN in the bytes of a scale
        # Two writes, so that a block is written in pieces; all requests in one batch.
        thirds = [n // 3 for n in self.seq_lens]
        for begins, ends in (([0] * len(thirds), thirds), (thirds, self.seq_lens)):
            if sum(ends) == sum(begins):
                continue
            query_lens = [end - begin for begin, end in zip(begins, ends)]
            parts = [slice(begin, end) for begin, end in zip(begins, ends)]
            key = [key[part] for key, part in zip(self.keys, parts)]
            value = [value[part] for value, part in zip(self.values, parts)]
            one = len(key) == 1  # keep its strides
            batch = backend.prepare(self.metadata(query_lens, ends))
            backend.write(key[0] if one else torch.cat(key), value[0] if one else torch.cat(value), cache, batch)
        return cache

    def metadata(self, query_lens: list[int], seq_lens: list[int] | None = None) -> AttentionMetadata:
        seq_lens = self.seq_lens if seq_lens is None else seq_lens
        table = self.block_table()
        query_start_loc = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
        slots = [
            int(table[row, position // self.block_size]) * self.block_size + position % self.block_size
            for row, (length, count) in enumerate(zip(seq_lens, query_lens))
            for position in range(length - count, length)
        ]
        return AttentionMetadata(
            query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            block_table=table.to(self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
            query_start_loc_cpu=query_start_loc,
            seq_lens_cpu=list(seq_lens),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            block_size=self.block_size,
        )

    def block_table(self) -> Tensor:
        """int32 [requests, max blocks per request]; scattered blocks, VOID past a request's end."""
        blocks = [self._blocks(n) for n in self.seq_lens]
        free = list(range(sum(blocks) + 2))
        random.Random(self.seed).shuffle(free)
        table = torch.full((len(blocks), max(blocks)), VOID, dtype=torch.int32)
        for row, count in enumerate(blocks):
            table[row, :count] = torch.tensor(free[:count])
            del free[:count]
        return table

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`."""
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()
