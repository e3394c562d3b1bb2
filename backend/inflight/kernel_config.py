"""`kernel_config` of a `model.json`: kernels that a card has not measured yet, each behind a switch.  No torch."""

from __future__ import annotations

import msgspec

__all__ = ["KernelConfig"]


class KernelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Switches of GPU kernels; all are off, and refused on a CPU.  See docs/gpu.md, "Switches".

    Attributes:
        split_k: linear layers with few outputs, in steps of at most 16 tokens, by a kernel whose programs share a
            layer's inputs, so that they fill the card.
        launch_pdl: kernels of a step start while the one before them still runs (programmatic dependent launch), on
            cards of compute capability 9.0 and up.
        varlen_attention: steps of whole prompts by torch's `varlen_attn` (FlashAttention-2).
        fused_experts: the experts of a mixture by kernels of four launches a layer; those of checkpoints in MXFP4 stay
            in four bits.
        block_fp8: checkpoints in fp8 with a scale per block keep them, and their inputs stay in 16 bits.
    """

    split_k: bool = False
    launch_pdl: bool = False
    varlen_attention: bool = False
    fused_experts: bool = False
    block_fp8: bool = False

    @property
    def switches(self) -> list[str]:
        """Names of the switches that are on."""
        return [name for name in self.__struct_fields__ if getattr(self, name)]
