"""Parametrisations with a few representative values in `make test`, and all of them in `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["ARCHITECTURES_IN_SHORT", "nightly_but"]

# A llama with nothing special; windows and softcap; experts; norms of heads; learned positions; a layer that nothing
# recognises.
ARCHITECTURES_IN_SHORT = ("llama", "gemma2", "qwen3_moe", "qwen3", "gpt2", "phi")


def nightly_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """`values` for `parametrize`; values that are not `kept` run nightly only.  They need not be hashable."""
    values = list(values)
    unknown = [value for value in kept if value not in values]
    assert not unknown, f"kept for `make test`, but not among the values: {unknown}"
    return [value if value in kept else pytest.param(value, marks=pytest.mark.nightly) for value in values]
