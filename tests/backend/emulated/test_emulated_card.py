"""The emulated card enforces what CUDA enforces, each rule by one program that breaks it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_card import Card, emulated_card, is_emulated
from torch import Tensor, nn
from torch.utils._device import _device_constructors

from .conftest import CUDA, double_kernel, on_card

CUDA0 = torch.device("cuda:0")


# -- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a + b,
        lambda a, b: a @ b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: a.index_select(0, b.long()),
        lambda a, b: a.index_copy_(0, torch.arange(3, device=CUDA), b),
        lambda a, b: torch.equal(a, b),
        lambda a, b: nn.functional.linear(a, b[None]),
    ],
)
def test_devices_do_not_mix(card: Card, mix: Callable[[Tensor, Tensor], Any]) -> None:
    a, b = on_card(0.0, 1.0, 2.0), torch.tensor([0.0, 1.0, 2.0])
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mix(a, b)
    mix(a, b.to(CUDA))


def test_numbers_of_the_host_are_arguments(card: Card) -> None:
    number = torch.tensor(2.0)
    product = on_card(1.0, 2.0) * number
    number.fill_(7.0)
    assert product.tolist() == [2.0, 4.0]


def test_numpy_and_kernels_cannot_read_the_other_sides_memory(card: Card) -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        on_card(1.0).numpy()
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        double_kernel[(1,)](torch.ones(4), torch.ones(4, device=CUDA), 4, BLOCK=4)


# -- waits --------------------------------------------------------------------------------------

WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: x.copy_(torch.zeros(3)),
    "pageable": lambda x: torch.empty(3).copy_(x, non_blocking=True),
    "mask": lambda x: x[x > 0],
    "put by mask": lambda x: x.__setitem__(x > 0, 0.0),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "new tensor": lambda x: torch.tensor([1], device=CUDA),
    "index of the host": lambda x: x[torch.tensor([0])],
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_of_the_host_are_found(card: Card, name: str) -> None:
    x = on_card(1.0, -2.0, 3.0)
    WAITS[name](x.clone())
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        WAITS[name](x)
    torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            WAITS[name](x)
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph.capture_end()


def test_what_does_not_wait_is_allowed(card: Card) -> None:
    pinned, x = torch.ones(3).pin_memory(), on_card(1.0, 2.0, 3.0)
    table = on_card(5.0, 6.0, 7.0)
    torch.cuda.set_sync_debug_mode("error")
    x.copy_(pinned, non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    x[:2] = table[torch.arange(2, device=CUDA)]
    torch.empty(3, device=CUDA).copy_(torch.ones(3), non_blocking=True)
    x.masked_fill_(x > 5, 0.0).topk(2)
    torch.cuda.Event().record()


# -- the order of work --------------------------------------------------------------------------


def test_results_are_there_only_after_their_event(card: Card) -> None:
    result, event = torch.zeros(2).pin_memory(), torch.cuda.Event()
    result.copy_(on_card(3.0, 4.0) + 1, non_blocking=True)
    event.record()
    assert not event.query()
    assert result.tolist() == [0.0, 0.0]
    event.synchronize()
    assert event.query()
    assert result.tolist() == [4.0, 5.0]


def test_a_buffer_that_is_written_too_early_shows(card: Card) -> None:
    host, target = torch.ones(2).pin_memory(), torch.empty(2, device=CUDA)
    target.copy_(host, non_blocking=True)
    host.fill_(9.0)
    assert target.tolist() == [9.0, 9.0]
    host.fill_(1.0)
    target.copy_(host, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    host.fill_(9.0)
    assert target.tolist() == [1.0, 1.0]


def test_streams_are_ordered_by_events_only(card: Card) -> None:
    side, x = torch.cuda.Stream(), torch.zeros(1, device=CUDA)
    torch.cuda.synchronize()
    x.fill_(1.0)
    with torch.cuda.stream(side):
        unordered = x + 0
    side.synchronize()
    x.fill_(2.0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ordered = x + 0
    side.synchronize()
    assert (unordered.inner.item(), ordered.inner.item()) == (0.0, 2.0)


def test_times_of_events_follow_their_order(card: Card) -> None:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    torch.ones(3, device=CUDA)
    ended.record()
    with pytest.raises(RuntimeError, match="not ready"):
        begun.elapsed_time(ended)
    ended.synchronize()
    assert begun.elapsed_time(ended) >= 0


def test_a_card_may_work_at_random_moments() -> None:
    with emulated_card(rng=random.Random(1)):
        x = torch.zeros(1, device=CUDA)
        for _ in range(50):
            x += 1
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            pass
        assert x.inner.item() == 50.0


def test_an_index_out_of_range_is_the_devices_error(card: Card) -> None:
    """It comes with the next wait, and with every later one."""
    on_card(1.0, 2.0).index_select(0, torch.full((1,), 7, device=CUDA))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device-side assert"):
            torch.cuda.synchronize()


# -- the rest of torch --------------------------------------------------------------------------


def test_products_in_fp8(card: Card) -> None:
    a, b = (torch.randn(32, 64).to(torch.float8_e4m3fn) for _ in range(2))
    rows, columns = torch.rand(32, 1), torch.rand(1, 32)
    on_card = [x.to(CUDA) for x in (a, b, rows, columns)]
    found = torch._scaled_mm(on_card[0], on_card[1].t(), on_card[2], on_card[3], out_dtype=torch.bfloat16)
    expected = (a.float() @ b.float().t()) * rows * columns
    torch.testing.assert_close(found.cpu().float(), expected, rtol=0.01, atol=0.01)
    one = torch.ones((), device=CUDA)
    torch._scaled_mm(on_card[0], on_card[1].t(), one, one, out_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        torch._scaled_mm(on_card[0][:, :24], on_card[1][:, :24].t(), one, one)
    with pytest.raises(RuntimeError, match="column major"):
        torch._scaled_mm(on_card[0], on_card[1].t().contiguous(), one, one)
    with pytest.raises(RuntimeError, match="scaling configuration"):
        torch._scaled_mm(on_card[0], on_card[1].t(), on_card[2][:5], on_card[3])


def test_modules_move_and_threads_see_the_card(card: Card) -> None:
    linear, x = nn.Linear(4, 3), torch.randn(2, 4)
    expected = linear(x)
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(linear.to("cuda")(x.to("cuda", non_blocking=True))))
    thread.start()
    thread.join()
    assert linear.weight.device == torch.device("cuda:0")
    torch.testing.assert_close(results[0].cpu(), expected)


def test_torchs_own_default_devices_hold() -> None:
    _device_constructors.cache_clear()
    with emulated_card(), torch.device("meta"):
        assert torch.tensor([]).device.type == "meta"
    with torch.device("meta"):
        assert torch.tensor([]).device.type == "meta"


def test_a_card_can_be_the_default_device(card: Card) -> None:
    with torch.device("cuda"):
        assert torch.get_default_device() == torch.tensor([]).device == CUDA0
        assert torch.tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
        assert torch.zeros(2).device == torch.as_tensor([3]).device == CUDA0
    assert torch.tensor([]).device.type == "cpu"


def test_random_numbers_have_a_seed_of_their_own(card: Card) -> None:
    torch.manual_seed(3)
    first = torch.randn(4, device=CUDA)
    on_the_host = torch.randn(4)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4), on_the_host)
    assert torch.equal(torch.randn(4, device=CUDA), first)


def test_nothing_of_it_stays() -> None:
    names = [(torch.cuda, name) for name in ("Event", "Stream", "CUDAGraph", "synchronize", "mem_get_info")]
    names += [(Tensor, "to"), (torch, "tensor"), (threading.Thread, "run")]
    before = [getattr(owner, name) for owner, name in names]
    with pytest.raises(ValueError, match="of the test"), emulated_card():
        assert is_emulated()
        torch.ones(3, device=CUDA)
        raise ValueError("of the test")
    assert not is_emulated()
    assert [getattr(owner, name) for owner, name in names] == before
    assert not torch.cuda.is_available()
    assert not vars(Tensor).keys() & {"to", "cuda", "pin_memory", "is_pinned", "new_tensor"}
    assert torch.is_grad_enabled()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(3, device=CUDA)


def test_results_are_shaped_by_what_they_are_computed_from(card: Card) -> None:
    """The card remembers the shapes of results: equal numbers of other types, and other strides, are not the same."""
    x = torch.ones(2, 3, dtype=torch.int64, device="cuda")
    for _ in range(2):
        assert [(x + 1).dtype, (x + 1.0).dtype, (x + True).dtype] == [torch.int64, torch.float32, torch.int64]
        assert torch.add(x, x[0]).shape == (2, 3)
        assert torch.add(x.t(), x.t()).stride() == (1, 3)
        assert torch.add(x, x).stride() == (3, 1)
        assert torch.full((2,), 1, device="cuda").dtype == torch.int64
        assert torch.full((2,), 1.0, device="cuda").dtype == torch.float32
        with pytest.raises(RuntimeError, match="broadcast"):
            torch.add(x, x[:, :2])
    kept = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            torch.set_default_dtype(dtype)
            assert torch.ones(2, device="cuda").dtype == dtype
            assert (x / 2).dtype == dtype
    finally:
        torch.set_default_dtype(kept)


def test_integers_are_counted(card: Card) -> None:
    counts = torch.histc(torch.tensor([0, 2, 2, 1, 2], dtype=torch.int32, device=CUDA), bins=4, min=0, max=3)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [1, 1, 3, 0]
