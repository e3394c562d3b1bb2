"""A LoRA adapter (arXiv:2106.09685), as requests name it: by its content.  No torch."""

from __future__ import annotations

import msgspec

__all__ = ["AdapterRef"]


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """Where an adapter lies, and which one it is.

    Attributes:
        name: as clients and messages call it; two names can be one adapter, and a name another one after a reload.
        id: 32 hexadecimal digits: BLAKE2b-128 of its configuration and weights.
        path: folder with `adapter_config.json` and `adapter_model.safetensors`, in PEFT's format, which never change.
        rank: the largest of its modules.
    """

    name: str
    id: str
    path: str
    rank: int
