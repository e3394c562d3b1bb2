"""Memory of the emulated card: its contents, its limit, and what comes back."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from emulated_card import Card, emulated_card

from inflight.attention.base import KVCache
from inflight.device.host_cache import StagedHostCache

from .conftest import CUDA, on_card

MIB = 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_new_floats_are_nan(card: Card, dtype: torch.dtype) -> None:
    assert torch.empty(3, dtype=dtype, device=CUDA).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_new_integers_are_wrong(card: Card, dtype: torch.dtype) -> None:
    bits = 8 * dtype.itemsize
    assert torch.empty(1, dtype=dtype, device=CUDA).item() == int("7f" * (bits // 8), 16)
    assert torch.empty(1, dtype=dtype, pin_memory=True).item() == int("7f" * (bits // 8), 16)


def test_freed_memory_is_poisoned_behind_the_work_that_uses_it(card: Card) -> None:
    x = on_card(1.0, 2.0)
    bytes_of_x = x.view(torch.uint8)
    interface = type("Bytes", (), {})()
    interface.__cuda_array_interface__ = {
        "shape": (8,), "typestr": "|u1", "data": (bytes_of_x.data_ptr(), False), "version": 2
    }  # fmt: skip
    alias = torch.as_tensor(interface, device=CUDA).view(torch.float32)
    used_in_time = alias + 0
    del x, bytes_of_x
    used_too_late = alias + 0
    assert used_in_time.tolist() == [1.0, 2.0]
    assert used_too_late.isnan().all()


def test_memory_is_limited_and_comes_back() -> None:
    with emulated_card(total=64 * MIB) as card:
        free, total = torch.cuda.mem_get_info()
        assert (free, total) == (64 * MIB, 64 * MIB)
        parts = [torch.empty(10 * MIB, dtype=torch.uint8, device=CUDA) for _ in range(6)]
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(10 * MIB, dtype=torch.uint8, device=CUDA)
        assert torch.cuda.memory_allocated() == 60 * MIB
        parts.clear()
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.memory_reserved() == torch.cuda.max_memory_reserved() == 60 * MIB
        assert torch.cuda.mem_get_info()[0] == 4 * MIB
        torch.empty(50 * MIB, dtype=torch.uint8, device=CUDA)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.mem_get_info()[0] == 64 * MIB
        assert torch.cuda.max_memory_reserved() == 0
        card.allocator.others = 60 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(10 * MIB, dtype=torch.uint8, device=CUDA)


def test_pinned_memory_may_be_freed_when_its_card_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    with emulated_card() as card:
        cache = StagedHostCache([KVCache(torch.empty(4, 8, device=CUDA), torch.empty(4, 8, device=CUDA))], 3)
        addresses = [tensor.data_ptr() for tensor in cache._host]
    del cache
    assert not failed
    assert [card.pinned.unregister(address) for address in addresses] == [713, 713], "they are unpinned"
