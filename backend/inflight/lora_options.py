"""Keys of `model.json` about LoRA adapters; names are vLLM's.  No torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["LoraOptions"]

_Count = Annotated[int, Meta(ge=1, le=2**20)]
_DEFAULT_KEPT = 32
_DEFAULT_SLOTS = 8


class LoraOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of `EngineConfig` about adapters.

    Attributes:
        enable_lora: serve LoRA adapters, which requests choose by name. See docs/lora.md.
        max_loras: maximum of different adapters that run at the same time on a GPU, which has memory for so many of
            rank `max_lora_rank`; requests for one more wait. `None`: 8. A CPU mixes any number.
        max_lora_rank: maximum rank of an adapter; one with a larger rank is refused. On a GPU every adapter takes the
            memory of one of this rank, rounded up to a power of 2 of at least 16.
        max_cpu_loras: maximum of adapters in memory; the ones used last stay. `None`: 32. It is also the maximum of
            different adapters that run at the same time; requests for one more wait.
        lora_dtype: dtype in which adapters are kept; "auto" is that of the model's activations. No other is served.
        lora_allowed_paths: folders from which the operator can load adapters while the model serves, besides those of
            multi_lora.json. []: none.
    """

    enable_lora: bool = False
    max_loras: _Count | None = None
    max_lora_rank: Annotated[int, Meta(ge=1, le=4096)] = 16
    max_cpu_loras: _Count | None = None
    lora_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    lora_allowed_paths: list[str] = []

    @property
    def num_kept_adapters(self) -> int:
        """`max_cpu_loras`, or its default."""
        return self.max_cpu_loras or _DEFAULT_KEPT

    def num_running_adapters(self, device: str) -> int:
        """Maximum of different adapters that run at the same time on "cpu" or "cuda"."""
        if device.startswith("cuda"):
            return min(self.num_device_adapters, self.num_kept_adapters)
        return self.num_kept_adapters

    @property
    def num_device_adapters(self) -> int:
        """`max_loras`, or its default for a GPU."""
        return self.max_loras or _DEFAULT_SLOTS
