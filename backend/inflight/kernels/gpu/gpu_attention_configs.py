"""Tile shapes of the attention kernel, and how many programs share its keys: arithmetic on the host, without a GPU.

A decode reads every key and value once, so its tiles are shaped to keep many bytes in flight: about
64 KiB per SM cover the latency of HBM3e at 4.8 TB/s (bytes in flight = bandwidth * latency: 36 GB/s per
SM of an H200 times 1 us, and as much again for the tiles being computed on).  A prefill is limited by
multiplications, so its tiles are the largest for which the tensor cores' accumulators leave registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from inflight.attention.base import LayerSpec

__all__ = ["SCRATCH_BYTES", "Card", "Geometry", "Room", "Tile", "padded", "room_for", "tile_for"]

# Scratch for the partial sums of split query blocks; bounded, so that it can be allocated once.
SCRATCH_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Card:
    """A card's resources for tiles: compute capability, number of SMs, shared memory per program in bytes."""

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
    """One compiled shape: rows of a long query block (0: none), keys per tile, warps, pipeline stages.

    `late`: values are multiplied one tile late, beside the softmax of the next; see `gpu_attention_kernel.py`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    late: bool = False


# (family, is decode) -> padded head size -> tile, for 16-bit queries.  Chosen to fit registers and shared memory
# (bench/gpu_attention.py --compile); on a GPU, --tune compares them with others.
_TILES: dict[tuple[str, bool], dict[int, Tile]] = {
    ("hopper", True): {64: Tile(0, 128, 4, 3), 128: Tile(0, 64, 4, 3), 256: Tile(0, 32, 4, 3)},
    ("hopper", False): {64: Tile(128, 64, 4, 4), 128: Tile(128, 64, 8, 4, late=True), 256: Tile(128, 32, 8, 4)},
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
    # wgmma is Hopper's: mma.sync of other cards is not asynchronous, and tcgen05 has another pipeline.  Values of an
    # fp8 pool are converted in registers, for which a product waits.
    late = table[size].late and card.capability[0] == 9 and spec.kv_cache_dtype is None
    return replace(table[size], late=late)


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
        """The most query blocks that a batch of this size has: each request's last one may have a single token."""
        if not self.tile.block_m:
            return num_requests
        return min(num_tokens, (num_tokens + num_requests * (self.block_q - 1)) // self.block_q)


@dataclass(frozen=True)
class Room:
    """The room that a launch has, per KV head: see `gpu_attention_plan.py`.

    Attributes:
        blocks: query blocks.
        extra: work items beyond one per query block; at most 2 * extra items are parts of a split block.
        rows: rows of scratch per part.
    """

    blocks: int
    extra: int
    rows: int

    @property
    def items(self) -> int:
        return self.blocks + self.extra


def room_for(geometry: Geometry, num_tokens: int, num_requests: int, max_query_len: int, running: int) -> Room:
    """Enough to fill the card twice if query blocks are few, and once if they are many and one context is long.

    Depends on no length of a request.  Programs of unused items cost little, but not nothing.

    Args:
        running: programs that the card runs concurrently.
    """
    rows = min(geometry.tile.block_m or geometry.short_rows, max_query_len * geometry.group)
    fits = SCRATCH_BYTES // (2 * geometry.num_kv_heads * rows * geometry.value_padded * 4)
    blocks = geometry.num_blocks(num_tokens, num_requests)
    wanted = max(running, 2 * running - blocks * geometry.num_kv_heads)
    return Room(blocks, min(-(-wanted // geometry.num_kv_heads), fits), rows)
