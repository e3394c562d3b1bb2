"""The emulated card enforces what CUDA enforces, each rule by one program that breaks it."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from emulated_card import Card, emulated_card, is_emulated
from torch import Tensor, nn
from torch.utils._device import _device_constructors

from inflight.kernels.gpu import gpu_pdl
from inflight.kernels.gpu.gpu_ops import GpuOps

CUDA, CUDA0 = torch.device("cuda"), torch.device("cuda:0")
MIB = 2**20


@triton.jit
def double_kernel(source, target, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, 2 * tl.load(source + offsets, mask=offsets < count), mask=offsets < count)


def on_card(*values: float) -> Tensor:
    return torch.tensor(values, device=CUDA)


def captured(work: Callable[[], Any], **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        result = work()
    return graph, result


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


def test_kernels_run_late_and_in_order(card: Card) -> None:
    x, y = on_card(1.0, 2.0, 3.0), torch.empty(3, device=CUDA)
    double_kernel[(1,)](x, y, 3, BLOCK=4)
    x.fill_(100.0)
    assert y.inner.isnan().all()
    assert (y + x).tolist() == [102.0, 104.0, 106.0]


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


def test_a_kernel_that_leaves_its_tensors_is_an_illegal_access(card: Card) -> None:
    double_kernel[(1,)](on_card(1.0), torch.empty(1, device=CUDA), 4, BLOCK=4)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize()


def test_grids_have_limits(card: Card) -> None:
    x = on_card(1.0)
    with pytest.raises(RuntimeError, match="invalid argument"):
        double_kernel[(1, 65536)](x, x, 1, BLOCK=4)


# -- kernels that start before the one before them has ended ------------------------------------


@triton.jit
def dependent_kernel(source, target, FIRST: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr):
    if FIRST:
        gpu_pdl.begin(True)
    if tl.program_id(0) < ROWS:
        tl.store(target + tl.program_id(0), 2 * tl.load(source + tl.program_id(0)))
    if LAST:
        gpu_pdl.begin(True)


def test_dependent_kernels_wait_before_they_access_memory(card: Card) -> None:
    x, y = on_card(1.0, 2.0), torch.empty(2, device=CUDA)
    for _ in range(2):  # recorded, and from the record
        dependent_kernel[(2,)](x, y, True, False, 2, launch_pdl=True)
        dependent_kernel[(2,)](y, x, True, False, 2, launch_pdl=True)
    assert x.tolist() == [16.0, 32.0]
    dependent_kernel[(2,)](x, y, False, True, 2)
    assert y.tolist() == [32.0, 64.0], "without launch_pdl it starts when the kernel before it has ended"
    dependent_kernel[(2,)](x, y, False, True, 2, launch_pdl=True)
    with pytest.raises(RuntimeError, match="a race: a program wants to read before it waits"):
        torch.cuda.synchronize()


@triton.jit
def idle_kernel(x, rows):
    if tl.program_id(0) < rows:
        gpu_pdl.begin(True)
        tl.store(x + tl.program_id(0), 0.0)


@pytest.mark.parametrize("rows", [0, 1])
def test_every_program_of_a_dependent_kernel_waits(card: Card, rows: int) -> None:
    """Also one without work: what follows is to wait for the kernels before this one, too."""
    x = on_card(1.0, 2.0)
    idle_kernel[(2,)](x, rows, launch_pdl=True)
    with pytest.raises(RuntimeError, match="did not wait for the kernel before it"):
        torch.cuda.synchronize()


def test_older_cards_have_no_dependent_kernels() -> None:
    with emulated_card(capability=(8, 9)):
        x = on_card(1.0, 2.0)
        with pytest.raises(RuntimeError, match=r"requires \.target sm_90"):
            dependent_kernel[(2,)](x, x, True, False, 2, launch_pdl=True)


def test_the_switch_launches_dependent_kernels(card: Card) -> None:
    assert gpu_pdl.pdl_options(True) == {"PDL": True, "launch_pdl": True}
    x, weight = torch.randn(3, 64, device=CUDA), torch.randn(64, device=CUDA)
    assert torch.equal(GpuOps(launch_pdl=True).rms_norm(x, weight, 1e-6), GpuOps().rms_norm(x, weight, 1e-6))


# -- memory -------------------------------------------------------------------------------------


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


# -- graphs -------------------------------------------------------------------------------------


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
