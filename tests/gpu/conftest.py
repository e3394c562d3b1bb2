"""These tests are for a GPU, and run on an emulated one where there is none.

They also run the correctness checks of the benchmarks.  On a GPU,

    PYTHONPATH=DIR python -m pytest tests/gpu

requires torch, triton, numpy, pytest and msgspec (in DIR, if it is not installed), and transformers for the tests of
the whole engine; no plugin of pytest, and no installation of this repository (docs/gpu.md).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_card import emulated_card

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

if find_spec("msgspec") is None:
    raise pytest.UsageError("msgspec not found; pip install --target DIR msgspec and put DIR on PYTHONPATH")

HAS_GPU = torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """The modules ask for a card when they are imported."""
    with contextlib.nullcontext() if HAS_GPU else emulated_card():
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def card() -> Iterator[None]:
    """One for each module, so that an error of its work cannot reach another one's tests."""
    with contextlib.nullcontext() if HAS_GPU else emulated_card():
        yield
