"""Tile shapes that `bench/gpu_attention.py --tune` compares with the shipped ones, by timed batch."""

from __future__ import annotations

from inflight.kernels.gpu.gpu_attention_configs import Tile

__all__ = ["SHORTLIST", "all_tiles"]

# The timed batch -> tiles worth comparing with the shipped one on a Hopper card (132 SMs, 227 KiB of shared memory and
# 64 Ki registers each).  A stage of a decode is 2 * block_n * head size * bytes per number; programs of an SM and
# stages together should keep at least 64 KiB in flight.
SHORTLIST = {
    # 3 programs of 64 KiB rather than 2 of 96; 3 of smaller tiles, which waste less of a short context; 1 of 192 KiB,
    # in which 8 warps wait for one another half as often.
    "decode 64 x 2K": (Tile(0, 64, 4, 2), Tile(0, 32, 4, 4), Tile(0, 128, 8, 3)),
    # Half the bytes per key: twice the keys for the same bytes in flight, or more stages for the conversion.
    "decode 64 x 4K fp8": (Tile(0, 128, 4, 3), Tile(0, 64, 4, 5)),
    "decode 64 x 2K d64": (Tile(0, 128, 4, 2), Tile(0, 64, 4, 4)),
    "decode 64 x 2K d256": (Tile(0, 32, 4, 2),),
    # 128 x 128 with two warp groups has the fewest bytes per product, and the accumulators (128 x 128 and the scores,
    # float32) leave 100 registers of each of 256 threads; 64 x 64 runs twice on an SM, so that the softmax of one
    # program overlaps the products of the other.
    "prefill 8K": (Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
    "prefill 8K d64": (Tile(128, 128, 8, 2),),
    "prefill 4K d256": (Tile(128, 64, 8, 2),),
}


def all_tiles() -> dict[str, tuple[Tile, ...]]:
    """228 tiles, most of which compile for nothing: for a card that the shortlist does not fit."""
    sizes = (16, 32, 64, 128)
    decode = tuple(Tile(0, n, warps, stages) for n in sizes for warps in (2, 4, 8) for stages in (2, 3, 4, 5))
    prefill = tuple(
        Tile(m, n, warps, stages) for m in (64, 128) for n in (32, 64, 128) for warps in (4, 8) for stages in (2, 3, 4)
    )
    decodes = ("decode 64 x 2K", "decode 8 x 16K", "decode 64 x 4K fp8", "decode 64 x 2K d64")
    return dict.fromkeys(decodes, decode) | {"prefill 8K": prefill}
