"""CUDA graphs of the emulated card: what a capture records, forbids and keeps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_card import Card
from torch import Tensor

from .conftest import CUDA, double_kernel, on_card

MIB = 2**20


def captured(work: Callable[[], Any], **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        result = work()
    return graph, result


def test_a_capture_runs_nothing_and_a_replay_uses_the_present_contents(card: Card) -> None:
    x = on_card(1.0, 2.0)
    graph, y = captured(lambda: x * 2 + 1)
    assert y.isnan().all()
    for values in ([1.0, 2.0], [5.0, 7.0]):
        x.copy_(torch.tensor(values))
        graph.replay()
        assert y.tolist() == [2 * value + 1 for value in values]


def test_numbers_of_the_host_are_those_of_the_capture(card: Card) -> None:
    x, number = on_card(1.0), [2.0]
    graph, y = captured(lambda: x * number[0])
    number[0] = 3.0
    graph.replay()
    assert y.tolist() == [2.0]


def test_a_replay_of_freed_memory_is_an_error(card: Card) -> None:
    x = [on_card(1.0)]
    graph, _ = captured(lambda: x[0] + 1)
    graph.replay()
    x[0] = on_card(5.0)
    with pytest.raises(RuntimeError, match="freed after its capture"):
        graph.replay()


def test_graphs_of_a_pool_destroy_each_others_results(card: Card) -> None:
    x = on_card(1.0)
    first, y = captured(lambda: x + 1)
    address = type("Bytes", (), {"__cuda_array_interface__": {
        "shape": (4,), "typestr": "|u1", "data": (y.data_ptr(), False), "version": 2}})()  # fmt: skip
    kept = torch.as_tensor(address, device=CUDA).view(torch.float32)
    del y
    second, _ = captured(lambda: x + 2, pool=first.pool())
    first.replay()
    assert kept.tolist() == [2.0]
    second.replay()
    assert kept.isnan().all()


def test_memory_of_a_capture_is_undefined_at_each_replay(card: Card) -> None:
    def half_written() -> Tensor:
        out = torch.empty(2, device=CUDA)
        out[:1] = 1.0
        return out

    graph, out = captured(half_written)
    for _ in range(2):
        graph.replay()
        assert out[0].item() == 1.0
        assert out[1].isnan().item()
        out.fill_(5.0)


def test_a_kernels_first_launch_cannot_be_captured(card: Card) -> None:
    x, y = on_card(1.0, 2.0), torch.empty(2, device=CUDA)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured(lambda: double_kernel[(1,)](x, y, 2, BLOCK=4))
    with torch.cuda.stream(torch.cuda.default_stream()):
        double_kernel[(1,)](x, y, 2, BLOCK=4)
        graph, _ = captured(lambda: double_kernel[(1,)](x, y, 2, BLOCK=4))
        with pytest.raises(RuntimeError, match="previous error"):
            captured(lambda: double_kernel[(1,)](x, y, 2, BLOCK=8))
    x.fill_(4.0)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert y.tolist() == [8.0, 8.0]


@pytest.mark.parametrize(
    "forbidden", [lambda: torch.cuda.synchronize(), lambda: torch.cuda.Event().query(), lambda: torch.ones(2).to(CUDA)]
)
def test_a_capture_forbids(card: Card, forbidden: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured(forbidden)


def test_the_default_stream_cannot_be_captured(card: Card) -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_a_failed_capture_keeps_memory_until_its_pool_is_ended(card: Card) -> None:
    """As torch before 2.12."""
    big = [torch.empty(20 * MIB, dtype=torch.uint8, device=CUDA)]
    pool = torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured(lambda: big[0].sum().item(), pool=pool)
    big.clear()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() >= 20 * MIB
    torch._C._cuda_endAllocateToPool(0, pool)
    torch._C._cuda_releasePool(0, pool)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 20 * MIB


def test_graphs_hold_their_pool_as_long_as_they_live(card: Card) -> None:
    graph, out = captured(lambda: torch.empty(20 * MIB, dtype=torch.uint8, device=CUDA))
    del out
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 20 * MIB
    del graph
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
