"""Tests here run the compiled kernels, and those of the Triton language in a quick interpreter."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
import torch
from card_rig import card
from emulated_card import is_emulated
from gpu_rounding import gpu_rounding
from kernel_build import current_kernel
from quick_interpreter import quick_interpreter

from inflight.kernels.cpu.library import use_instruction_set
from inflight.kernels.gpu.launch import interpreted

__all__ = ["card", "current_kernel", "gpu_rounding"]


@pytest.fixture(params=["avx512bf16", "avx512vnni", "avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU kernels of an instruction set."""
    if not use_instruction_set(request.param):
        pytest.skip(f"this machine lacks {request.param}")
    yield request.param
    use_instruction_set("")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Within the test's fixtures: `gpu_rounding` changes the interpreter, too.  An emulated card has made it quick."""
    if is_emulated() or not interpreted():
        return (yield)
    with quick_interpreter():
        return (yield)
