"""Tile shapes that `bench/gpu_attention.py --tune` compares with the shipped ones, by timed batch."""

from __future__ import annotations

from inflight.kernels.gpu.gpu_attention_configs import Tile

__all__ = ["SHORTLIST"]

# The timed batch -> tiles worth comparing with the shipped one on a Hopper card, whose SMs have 227 KiB of shared
# memory and 64 Ki registers.  A decode reads at full speed if the programs of an SM have about 64 KiB in flight: few
# large programs with many stages, or many small ones.  Numbers are what the compiler for sm_90 reports (--compile).
SHORTLIST = {
    # Shipped: 64 keys, 3 stages, 70 KiB, 3 programs on an SM.  Four of 38 KiB with one stage less; four of 53 KiB
    # whose smaller tiles waste less of a short context; one of 136 KiB with twice the warps.
    "decode 64 x 2K": (Tile(0, 64, 4, 2), Tile(0, 32, 4, 4), Tile(0, 128, 8, 3)),
    # Shipped: 38 KiB, 3 programs by their registers, so half the bytes in flight: larger tiles, or two more stages.
    "decode 64 x 4K fp8": (Tile(0, 128, 4, 3), Tile(0, 64, 4, 5)),
    # Shipped: 70 KiB, 3 programs.  Five of 38 KiB.
    "decode 64 x 2K d64": (Tile(0, 128, 4, 2),),
    # Shipped: 168 registers in 4 warps, 3 programs.  Eight warps share the rows of 256 numbers.
    "decode 64 x 2K d256": (Tile(0, 32, 8, 3),),
    # Shipped: 128 x 64, 8 warps, one program on an SM; each softmax runs beside the product of the tile before (late).
    # The same without that, to see what it brings; 128 x 128 has fewer and larger products, takes all registers and
    # spills 64 bytes.  Of 64 x 64 with 4 warps two fit, so products of one also run beside the softmax of the other.
    "prefill 8K": (Tile(128, 64, 8, 4), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3, late=True)),
    # Shipped: 4 warps, two programs.  One program with 8 warps and 227 registers: late values without a spill.
    "prefill 8K d64": (Tile(128, 128, 8, 2, late=True),),
    # Shipped: 128 x 32.  Larger tiles, at the price of spilling 64 bytes.
    "prefill 4K d256": (Tile(128, 64, 8, 2),),
}
