"""Dtypes of attention: what the pool may store, and how a kernel says that it lacks one."""

from __future__ import annotations

import torch

__all__ = ["KV_DTYPES", "unsupported_dtype", "unsupported_kv_dtype"]

# Values of `kv_cache_dtype` in the configuration; None is the model's dtype.
KV_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def unsupported_dtype(dtype: torch.dtype) -> str | None:
    """The reason for `AttentionBackend.unsupported` unless `dtype` is float32, bfloat16 or float16."""
    if dtype in (torch.float32, torch.bfloat16, torch.float16):
        return None
    return f"dtype={str(dtype).removeprefix('torch.')} (supported: float32, bfloat16 and float16)"


def unsupported_kv_dtype(stored: torch.dtype | None, *supported: str) -> str | None:
    """The reason for `AttentionBackend.unsupported` unless a layer's `kv_cache_dtype` is one of `supported`."""
    name = next(name for name, dtype in KV_DTYPES.items() if dtype == stored)
    if name in supported:
        return None
    return f"kv_cache_dtype={name!r} (supported: {' and '.join(map(repr, supported))})"
