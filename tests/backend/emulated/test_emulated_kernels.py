"""Kernels on the emulated card: their order, their memory, and kernels that start before others have ended."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from emulated_card import Card, emulated_card

from inflight.kernels.gpu import gpu_pdl
from inflight.kernels.gpu.gpu_ops import GpuOps

from .conftest import CUDA, double_kernel, on_card


def test_kernels_run_late_and_in_order(card: Card) -> None:
    x, y = on_card(1.0, 2.0, 3.0), torch.empty(3, device=CUDA)
    double_kernel[(1,)](x, y, 3, BLOCK=4)
    x.fill_(100.0)
    assert y.inner.isnan().all()
    assert (y + x).tolist() == [102.0, 104.0, 106.0]


def test_a_kernel_that_leaves_its_tensors_is_an_illegal_access(card: Card) -> None:
    double_kernel[(1,)](on_card(1.0), torch.empty(1, device=CUDA), 4, BLOCK=4)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize()


def test_grids_have_limits(card: Card) -> None:
    x = on_card(1.0)
    with pytest.raises(RuntimeError, match="invalid argument"):
        double_kernel[(1, 65536)](x, x, 1, BLOCK=4)


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
