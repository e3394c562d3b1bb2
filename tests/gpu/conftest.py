"""These tests are for a GPU.  Without one they run on an emulated card, with smaller sizes (`sized`).

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

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

if find_spec("msgspec") is None:
    raise pytest.UsageError("msgspec not found; pip install --target DIR msgspec and put DIR on PYTHONPATH")

HAS_GPU = torch.cuda.is_available()

# On an emulated card these run nightly: each repeats, for another model or option, a test that `make test` runs.
NIGHTLY = {
    "test_every_kind_of_request_is_as_without_graphs[32]",
    "test_every_rule_gives_the_tokens_of_the_cpu[eager, one at a time]",
    "test_every_rule_gives_the_tokens_of_the_cpu[preempting]",
    "test_every_rule_gives_the_tokens_of_the_cpu[swapping]",
    "test_the_engine_serves_with_weights_and_kv_in_fp8[True]",
    "test_a_model_that_looks_at_its_tensors_runs_eagerly",
    "test_steps_with_prompts_are_as_without_graphs",
    "test_padding_touches_no_slot_of_the_pool",
    *(f"test_greedy_output_equals_generate[{model}]" for model in ("gemma2", "qwen3", "phi3", "granite")),
}


def _card() -> contextlib.AbstractContextManager[Any]:
    if HAS_GPU:
        return contextlib.nullcontext()
    from emulated_card import emulated_card

    return emulated_card()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): with pytest-xdist, tests of a group share a process")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """The modules ask for a card when they are imported."""
    with _card():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not HAS_GPU and item.name in NIGHTLY and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    """One for each test: after an error of its work a card is of no use."""
    with _card():
        yield


@pytest.fixture
def any_kernels(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are not what is tested: on the emulated card, engines have functions of torch in their place."""
    if not HAS_GPU:
        from card_rig import functions_as_kernels

        functions_as_kernels(monkeypatch)
