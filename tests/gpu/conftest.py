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

# Tests that say nothing on an emulated card, by name.
NOT_EMULATED = {
    "test_more_tokens_than_a_grid_dimension": "70,000 programs take minutes in the interpreter",
    "test_a_models_logits_are_the_twins[qwen3_moe]": "torch has no histogram of integers on a CPU",
    "test_nothing_is_compiled_after_load": "the interpreter compiles nothing at load",
    "test_one_long_context_among_short_ones": "a context of 60,000 tokens takes minutes in the interpreter",
}
# Tests that `make test` runs on an emulated card; the others run nightly, since the interpreter is slow.
IN_SHORT = (
    "test_agrees_with_the_reference[decode-torch.bfloat16]",
    "test_agrees_with_the_reference[mix-torch.float32]",
    "test_layouts[fused]",
    "test_fp8_pool[mix]",
    "test_write_touches_the_mapped_slots_only",
    "test_a_captured_step_serves_other_batches[never split]",
    "test_auto_selects_it",
    "test_inputs_equal_their_definition[limits0]",
    "test_products_are_the_twins[16-16-True-torch.bfloat16]",
    "test_quantising_is_the_twins",
    "test_merged_layers_compute_the_same",
    "test_a_models_logits_are_the_twins[llama]",
    "test_swapped_blocks_come_back",
    "test_a_gpu_uses_them",
    "test_the_host_waits_for_nothing",
    "test_captured_in_a_graph",
    "test_a_row_alone_and_in_a_batch",
)


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
    if HAS_GPU:
        return
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        name = item.name.partition("[")[0]
        reason = NOT_EMULATED.get(item.name) or NOT_EMULATED.get(name)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.name not in IN_SHORT:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    """One for each test: after an error of its work a card is of no use."""
    with _card():
        yield
