"""Tests here run the compiled kernels, and those of the Triton language in a quick interpreter."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from card_rig import card
from emulated_card import is_emulated
from gpu_rounding import gpu_rounding
from kernel_build import current_kernel
from quick_interpreter import quick_interpreter

from inflight.kernels.gpu.launch import interpreted

__all__ = ["card", "current_kernel", "gpu_rounding"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Within the test's fixtures: `gpu_rounding` changes the interpreter, too.  An emulated card has made it quick."""
    if is_emulated() or not interpreted():
        return (yield)
    with quick_interpreter():
        return (yield)
