"""Tile shapes of the Triton kernel and how it splits keys: host arithmetic, without a GPU.

A decode reads every key and value once, so its tiles are shaped to keep many bytes in flight: about
64 KiB an SM cover the latency of HBM3e at 4.8 TB/s (bytes in flight = bandwidth * latency: 36 GB/s an
SM of an H200 times 1 us, and as much again for what is being computed on).  A prefill multiplies, so
its tiles are the largest that the tensor cores' accumulators leave registers for.
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
# Scratch for the partial sums of split query blocks: bounded, so that it is allocated once.
SCRATCH_BYTES = 32 * 2**20
# Costs beside the walk over the tiles, in tiles: starting a program, and the second pass.
_START_COST = 2.0
_REDUCE_COST = 3.0
_SPLIT_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, MAX_SPLITS)
_MIN_SPLIT_TILES = 2


@dataclass(frozen=True)
class Card:
    """What tile shapes depend on: compute capability, SMs, bytes of shared memory a program may take."""

    capability: tuple[int, int]
    num_sms: int
    shared_memory: int

    @classmethod
    def of(cls, device: torch.device) -> Card:
        seen: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks what is asked for
        return cls((seen.major, seen.minor), seen.multi_processor_count, seen.shared_memory_per_block_optin)

    def programs_at_once(self, num_warps: int, registers: int, shared: int) -> int:
        """Programs that an SM runs at once, by what each takes (CUDA programming guide, compute capabilities)."""
        by_registers = 65536 // (32 * num_warps * max(8, -(-registers // 8) * 8))
        by_shared = (self.shared_memory + 1024) // (shared + 1024)  # the system takes 1 KiB of each
        return max(1, min(by_registers, by_shared, 48 // num_warps))

    @property
    def family(self) -> str:
        """Row of the table: "hopper" (also Blackwell of data centres), "ampere" (A100) or "small"."""
        if self.shared_memory >= 200 * 1024:
            return "hopper"
        return "ampere" if self.shared_memory >= 150 * 1024 else "small"


@dataclass(frozen=True)
class Tile:
    """One compiled shape: rows of a long query block (0: none), keys of a tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (family, is decode) -> padded head size -> tile, for 16-bit queries.  Chosen by what fits registers and shared
# memory (bench/gpu_attention.py --compile); on a card, --tune times others beside these.
_TILES: dict[tuple[str, bool], dict[int, Tile]] = {
    ("hopper", True): {64: Tile(0, 128, 4, 3), 128: Tile(0, 64, 4, 3), 256: Tile(0, 32, 4, 3)},
    ("hopper", False): {64: Tile(128, 64, 4, 4), 128: Tile(128, 64, 8, 4), 256: Tile(128, 32, 8, 4)},
    ("ampere", True): {64: Tile(0, 64, 4, 4), 128: Tile(0, 32, 4, 4), 256: Tile(0, 32, 4, 2)},
    ("ampere", False): {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 4, 2)},
    ("small", True): {64: Tile(0, 64, 4, 3), 128: Tile(0, 32, 4, 3), 256: Tile(0, 16, 4, 3)},
    ("small", False): {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(64, 16, 4, 2)},
}
# float32 has no tensor-core path without tf32: small tiles on plain arithmetic units.
_FLOAT32_TILES: dict[bool, dict[int, Tile]] = {
    True: {64: Tile(0, 32, 4, 1), 128: Tile(0, 32, 4, 1), 256: Tile(0, 16, 4, 1)},
    False: {64: Tile(32, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(32, 16, 8, 1)},
}


def padded(size: int) -> int:
    """Width of a tile row: the next power of two, at least what a tensor-core product takes."""
    return max(16, 1 << (size - 1).bit_length())


def tile_for(card: Card, spec: LayerSpec, dtype: torch.dtype, is_decode: bool) -> Tile:
    """The table's entry for a layer."""
    size = max(64, padded(spec.key_head_size), padded(spec.value_head_size))
    table = _FLOAT32_TILES[is_decode] if dtype == torch.float32 else _TILES[card.family, is_decode]
    return table[size]


@dataclass(frozen=True)
class Geometry:
    """How a layer's query blocks are cut: with `tile.block_m` 0 every request is one short block.

    Attributes:
        group: query heads of a KV head.
        window: tokens that a token sees; 0 for all.
    """

    tile: Tile
    group: int
    num_kv_heads: int
    value_padded: int
    window: int

    @cached_property
    def short_rows(self) -> int:
        """Rows of a short block: a tensor-core product has at least 16."""
        return padded(self.group)

    @property
    def short_tokens(self) -> int:
        return self.short_rows // self.group

    @property
    def block_q(self) -> int:
        """Tokens of a query block."""
        return self.tile.block_m // self.group if self.tile.block_m else self.short_tokens

    def num_blocks(self, num_tokens: int, num_requests: int) -> int:
        """Query blocks that a grid must offer."""
        return num_tokens // self.block_q + num_requests if self.tile.block_m else num_requests


@dataclass(frozen=True)
class SplitPlan:
    """Splits of a launch.

    Attributes:
        num_splits: most programs that share one query block's keys.
        split_tiles: tiles of a split; the last one takes what is left.
        slots: rows of scratch are [slots, num_kv_heads, slot_rows, num_splits].
        short_only: slots are requests and long ones stay whole; else slots are query blocks.
    """

    num_splits: int = 1
    split_tiles: int = 2**30
    slots: int = 0
    slot_rows: int = 0
    short_only: bool = False


def plan_splits(geometry: Geometry, metadata: AttentionMetadata, running: int) -> SplitPlan:
    """Choose by the estimated time to the last program's end.

    Args:
        running: programs that the card runs at once.
    """
    counts = np.diff(np.asarray(metadata.query_starts))
    lens = np.asarray(metadata.lens)
    lens, counts = lens[counts > 0], counts[counts > 0]
    if not len(lens):
        return SplitPlan()
    heads = geometry.num_kv_heads
    total_blocks = geometry.num_blocks(metadata.query_starts[-1], len(metadata.lens))
    slot_rows = geometry.tile.block_m or geometry.short_rows
    bytes_per_row = 4 * geometry.value_padded
    short_only = False
    if total_blocks * heads * slot_rows * 2 * bytes_per_row > SCRATCH_BYTES:
        short_only, slot_rows = True, geometry.short_rows
    slots = len(metadata.lens) if short_only else total_blocks
    room = SCRATCH_BYTES // (slots * heads * slot_rows * bytes_per_row)

    blocks = -(-counts // geometry.block_q)
    seen = lens - counts // 2 if not geometry.window else np.minimum(lens - counts // 2, geometry.window)
    tiles = np.maximum(-(-seen // geometry.tile.block_n), 1)
    splits_here = counts <= geometry.short_tokens if short_only else np.ones(len(lens), dtype=bool)
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
