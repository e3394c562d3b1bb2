"""FlashAttention on an emulated card: torch's `varlen_attn`, and the package of FlashAttention-3.

Each call is one launch of a function of torch, and its arguments are checked as FlashAttention checks them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from flash_attention import flash_attn_with_kvcache, varlen_attn_2_11, varlen_attn_2_12
from torch import Tensor

from emulated_card.tensors import launch_function

__all__ = ["flash_attention"]

_PACKAGE = "flash_attn_interface"


def _launched(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, whose result has the shape of its first argument, as one launch."""

    def run(out: Tensor, args: Any, kwargs: Any) -> None:
        out.copy_(function(*args, **kwargs))

    @functools.wraps(function)
    def call(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = torch.empty_like(query)
        launch_function(run, out, (query, *args), kwargs)
        return out

    return call


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """Within the block they are installed."""
    from inflight.kernels.gpu import gpu_flash3, gpu_varlen  # they need the triton package

    torchs: Any = importlib.import_module("torch.nn.attention.varlen")
    names_groups = "enable_gqa" in inspect.signature(torchs.varlen_attn).parameters
    varlen_attn = _launched(varlen_attn_2_12 if names_groups else varlen_attn_2_11)
    package: Any = ModuleType(_PACKAGE)
    package.__spec__ = ModuleSpec(_PACKAGE, None)
    package.flash_attn_with_kvcache = _launched(flash_attn_with_kvcache)
    remembered = gpu_varlen._varlen_attn, gpu_flash3._flash_attention
    installed = sys.modules.get(_PACKAGE)
    with patch.object(torchs, "varlen_attn", varlen_attn):
        sys.modules[_PACKAGE] = package  # not by patch.dict, which also takes back what is imported meanwhile
        for function in remembered:
            function.cache_clear()
        try:
            yield
        finally:
            del sys.modules[_PACKAGE]
            if installed is not None:
                sys.modules[_PACKAGE] = installed
            for function in remembered:
                function.cache_clear()
