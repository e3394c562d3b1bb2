"""Tile shapes of the attention kernel, and how it splits keys: arithmetic on the host, without a GPU.

A decode reads every key and value once, so its tiles are shaped to keep many bytes in flight: about
64 KiB per SM cover the latency of HBM3e at 4.8 TB/s (bytes in flight = bandwidth * latency: 36 GB/s per
SM of an H200 times 1 us, and as much again for the tiles being computed on).  A prefill is limited by
multiplications, so its tiles are the largest for which the tensor cores' accumulators leave registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from inflight.attention.base import AttentionMetadata, LayerSpec

__all__ = ["MAX_SPLITS", "SCRATCH_BYTES", "Card", "Geometry", "SplitPlan", "Tile", "padded", "plan_splits", "tile_for"]

MAX_SPLITS = 32
# Scratch for the partial sums of split query blocks; bounded, so that it can be allocated once.
SCRATCH_BYTES = 32 * 2**20
# Costs besides processing tiles, in tiles: starting a program, and the second pass.
_START_COST = 2.0
_REDUCE_COST = 3.0
_SPLIT_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, MAX_SPLITS)
_MIN_SPLIT_TILES = 2


@dataclass(frozen=True)
class Card:
    """What tile shapes depend on: compute capability, number of SMs, shared memory per program in bytes."""

    capability: tuple[int, int]
    num_sms: int
    shared_memory: int

    @classmethod
    def of(cls, device: torch.device) -> Card:
        found: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the last one
        return cls((found.major, found.minor), found.multi_processor_count, found.shared_memory_per_block_optin)

    def programs_at_once(self, num_warps: int, registers: int, shared: int) -> int:
        """Programs that an SM runs concurrently, given what each takes (see NVIDIA's CUDA programming guide)."""
        by_registers = 65536 // (32 * num_warps * max(8, -(-registers // 8) * 8))
        by_shared = (self.shared_memory + 1024) // (shared + 1024)  # 1 KiB of each is reserved
        return max(1, min(by_registers, by_shared, 48 // num_warps))

    @property
    def family(self) -> str:
        """Row of the table: "hopper" (also Blackwell in data centres), "ampere" (A100) or "small"."""
        if self.shared_memory >= 200 * 1024:
            return "hopper"
        return "ampere" if self.shared_memory >= 150 * 1024 else "small"


@dataclass(frozen=True)
class Tile:
    """One compiled shape: rows of a long query block (0: none), keys per tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (family, is decode) -> padded head size -> tile, for 16-bit queries.  Chosen to fit registers and shared memory
# (bench/gpu_attention.py --compile); on a GPU, --tune compares them with others.
_TILES: dict[tuple[str, bool], dict[int, Tile]] = {
    ("hopper", True): {64: Tile(0, 128, 4, 3), 128: Tile(0, 64, 4, 3), 256: Tile(0, 32, 4, 3)},
    ("hopper", False): {64: Tile(128, 64, 4, 4), 128: Tile(128, 64, 8, 4), 256: Tile(128, 32, 8, 4)},
    ("ampere", True): {64: Tile(0, 64, 4, 4), 128: Tile(0, 32, 4, 4), 256: Tile(0, 32, 4, 2)},
    ("ampere", False): {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 4, 2)},
    ("small", True): {64: Tile(0, 64, 4, 3), 128: Tile(0, 32, 4, 3), 256: Tile(0, 16, 4, 3)},
    ("small", False): {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(64, 16, 4, 2)},
}
# Without tf32, tensor cores do not multiply float32: small tiles for the general arithmetic units.
_FLOAT32_TILES: dict[bool, dict[int, Tile]] = {
    True: {64: Tile(0, 32, 4, 1), 128: Tile(0, 32, 4, 1), 256: Tile(0, 16, 4, 1)},
    False: {64: Tile(32, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(32, 16, 8, 1)},
}


def padded(size: int) -> int:
    """Width of a tile row: the next power of two, and at least the minimum of a tensor-core product."""
    return max(16, 1 << (size - 1).bit_length())


def tile_for(card: Card, spec: LayerSpec, dtype: torch.dtype, is_decode: bool) -> Tile:
    """The tile for a layer."""
    size = max(64, padded(spec.key_head_size), padded(spec.value_head_size))
    table = _FLOAT32_TILES[is_decode] if dtype == torch.float32 else _TILES[card.family, is_decode]
    return table[size]


@dataclass(frozen=True)
class Geometry:
    """How a layer's queries are divided into blocks; with `tile.block_m` 0 every request is one short block.

    Attributes:
        group: query heads per KV head.
        window: number of tokens a token attends to; 0 is no limit.
    """

    tile: Tile
    group: int
    num_kv_heads: int
    value_padded: int
    window: int

    @cached_property
    def short_rows(self) -> int:
        """Rows of a short block; at least 16, for tensor cores."""
        return padded(self.group)

    @property
    def short_tokens(self) -> int:
        return self.short_rows // self.group

    @property
    def block_q(self) -> int:
        """Tokens per query block."""
        return self.tile.block_m // self.group if self.tile.block_m else self.short_tokens

    def num_blocks(self, num_tokens: int, num_requests: int) -> int:
        """Query blocks that a grid must have room for."""
        return num_tokens // self.block_q + num_requests if self.tile.block_m else num_requests


@dataclass(frozen=True)
class SplitPlan:
    """How a launch splits keys.

    Attributes:
        num_splits: maximum number of programs that share one query block's keys.
        split_tiles: tiles per split; the last one takes the rest.
        slots: rows of scratch are [slots, num_kv_heads, slot_rows, num_splits].
        short_only: slots are requests, and long ones are not split; otherwise slots are query blocks.
    """

    num_splits: int = 1
    split_tiles: int = 2**30
    slots: int = 0
    slot_rows: int = 0
    short_only: bool = False


def plan_splits(geometry: Geometry, metadata: AttentionMetadata, running: int) -> SplitPlan:
    """Minimise the estimated time until the last program ends.

    Args:
        running: programs that the card runs concurrently.
    """
    query_lens = np.diff(np.asarray(metadata.query_start_loc_cpu))
    seq_lens = np.asarray(metadata.seq_lens_cpu)
    num_requests = len(seq_lens)
    seq_lens, query_lens = seq_lens[query_lens > 0], query_lens[query_lens > 0]
    if not len(seq_lens):
        return SplitPlan()
    heads = geometry.num_kv_heads
    total_blocks = geometry.num_blocks(metadata.query_start_loc_cpu[-1], num_requests)
    slot_rows = geometry.tile.block_m or geometry.short_rows
    bytes_per_row = 4 * geometry.value_padded
    short_only = False
    if total_blocks * heads * slot_rows * 2 * bytes_per_row > SCRATCH_BYTES:
        short_only, slot_rows = True, geometry.short_rows
    slots = num_requests if short_only else total_blocks
    room = SCRATCH_BYTES // (slots * heads * slot_rows * bytes_per_row)

    blocks = -(-query_lens // geometry.block_q)
    keys = seq_lens - query_lens // 2  # per query, on average
    keys = np.minimum(keys, geometry.window) if geometry.window else keys
    tiles = np.maximum(-(-keys // geometry.tile.block_n), 1)
    splits_here = query_lens <= geometry.short_tokens if short_only else np.ones(len(seq_lens), dtype=bool)
    if not splits_here.any():
        return SplitPlan()
    whole = blocks[~splits_here]
    whole_tiles = int((whole * tiles[~splits_here]).sum())
    some, some_tiles = int(blocks[splits_here].sum()), int((blocks * tiles)[splits_here].sum())
    mean, longest = some_tiles / some, int(tiles[splits_here].max())

    def cost(split_tiles: int) -> float:
        programs = heads * (int(whole.sum()) + some * -(-mean // split_tiles))
        each = heads * (whole_tiles + some_tiles) / programs + _START_COST
        waves = -(-programs // running)
        second_pass = _REDUCE_COST if split_tiles < longest else 0.0
        return max(waves * each, split_tiles + _START_COST) + second_pass

    options = [max(-(-longest // n), _MIN_SPLIT_TILES) for n in _SPLIT_COUNTS if n <= room]
    split_tiles = min(options, key=cost, default=longest)
    num_splits = -(-longest // split_tiles)
    if num_splits == 1:
        return SplitPlan()
    return SplitPlan(num_splits, split_tiles, slots, slot_rows, short_only)
