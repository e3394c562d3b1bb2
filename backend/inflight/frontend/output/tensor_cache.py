"""Keeps output tensors that repeat from response to response.  No Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["TensorCache"]

# Outputs that have the same few values in most responses.
_REPEATED = frozenset(
    {
        *("finish_reason", "stop_reason", "num_output_tokens", "token_counts"),
        *("num_input_tokens", "num_cached_tokens", "sequence_index", "batch_index", "lora_digest", "checkpoint_id"),
    }
)
_MAX_TENSORS = 256


class TensorCache:
    """Makes tensors; those with one element of an output that repeats are kept, and made once.

    Triton copies a tensor into shared memory when it is sent first, and sends that copy again after: a kept tensor
    costs neither.  Used by the sender thread.

    Args:
        make: makes a tensor of a name and an array.
        limit: maximum number of kept tensors.
    """

    def __init__(self, make: Callable[[str, np.ndarray], Any], limit: int = _MAX_TENSORS) -> None:
        self._make = make
        self._limit = limit
        self._kept: dict[tuple[str, Any], Any] = {}

    def tensor(self, name: str, array: np.ndarray) -> Any:
        """The tensor of an output."""
        if array.size != 1 or name not in _REPEATED:
            return self._make(name, array)
        key = name, array.item()
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= self._limit:  # lengths of many prompts: the others come back at once
                self._kept.clear()
            kept = self._kept[key] = self._make(name, array)
        return kept

    def clear(self) -> None:
        """Release the tensors; they are in the shared memory of a model instance, which is closed at its end."""
        self._kept.clear()
