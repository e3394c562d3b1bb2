"""These tests are for a GPU.  Without one they run on an emulated card, with smaller sizes (`sized`).

They also run the correctness checks of the benchmarks.  On a GPU,

    PYTHONPATH=DIR python -m pytest tests/gpu

requires torch, triton, numpy, pytest, msgspec and xxhash (in DIR, if they are not installed), and transformers for the
tests of the whole engine; no plugin of pytest, and no installation of this repository (docs/gpu.md).
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

if find_spec("msgspec") is None or find_spec("xxhash") is None:
    raise pytest.UsageError("pip install --target DIR msgspec xxhash, and put DIR on PYTHONPATH")

HAS_GPU = torch.cuda.is_available()

# On an emulated card `make test` runs only these cases of a test, by pytest's ids; others repeat them for another model
# or option, and run nightly.  A test without a case here has a counterpart for the emulated card in tests/backend.
IN_MAKE_TEST: dict[str, dict[str, list[str]]] = {
    "test_gpu_attention.py": {
        # The other shapes run in tests/backend/kernels/test_gpu_attention.py.
        "test_agrees_with_the_reference": [
            *("mix-torch.bfloat16", "all features-torch.bfloat16", "prompts-torch.float32"),
            *("chunks in the middle-torch.bfloat16", "a few tokens each-torch.float32", "head size 96-torch.bfloat16"),
            *("head size 256-torch.float32", "head size 8-torch.bfloat16", "group of 71-torch.float32"),
            *("window-torch.float32", "window of one-torch.bfloat16", "softcap-torch.float32", "sinks-torch.float32"),
            *("blocks of 48-torch.bfloat16", "blocks as tiles-torch.float32"),
        ],
        "test_long_contexts_and_every_block_size": [
            *("[1, 1, 1]-16", "[1, 1, 1]-128", "[4, 1, 2]-64", "[1, 70, 6]-32", "[1, 70, 6]-256"),
        ],
    },
    # tests/backend/kernels/test_gpu_graph_steps.py has these rules by the kernels that sample.
    "test_gpu_device_runner.py": {"test_every_rule_gives_the_tokens_of_the_cpu": ["preempting"]},
    "test_gpu_engine.py": {
        "test_greedy_output_equals_generate": ["llama"],
        "test_seeded_output_equals_that_of_the_cpu": [],  # tests/backend/kernels/test_gpu_graph_steps.py
    },
    "test_gpu_kv_tiers.py": {"test_a_conversation_returns_in_a_new_engine": []},  # emulated/test_tiers_on_a_card.py
    "test_gpu_experts.py": {
        "test_experts_are_right_and_bits_repeat": ["plain-torch.bfloat16", "mxfp4-torch.float16"],
    },
    "test_gpu_fp8.py": {
        "test_a_models_logits_are_the_twins": ["llama"],
        "test_checkpoints_in_fp8_run_as_they_are": ["per channel"],
        # tests/backend/loading/test_fp8_linear.py and, a few steps by the card's runner, test_gpu_order.py
        "test_the_engine_serves_with_weights_and_kv_in_fp8": [],
    },
    "test_gpu_graphs.py": {
        "test_greedy_output_equals_generate": ["gpt_oss"],
        # tests/backend/emulated/test_engine_on_a_card.py
        "test_every_kind_of_request_is_as_without_graphs": [],
        "test_a_model_that_looks_at_its_tensors_runs_eagerly": [],
        # tests/backend/runner/test_mixed_graphs.py and test_graph_steps.py
        "test_steps_with_prompts_are_as_without_graphs": [],
        "test_steps_with_drafts_are_as_without_graphs_and_without_drafts": [],
        "test_padding_touches_no_slot_of_the_pool": [],
    },
    "test_gpu_int4.py": {
        "test_products_are_those_of_the_codes": ["(72, 256, 16)-mins-torch.bfloat16"],
        "test_a_row_has_the_same_bits_in_every_batch_of_up_to_64": ["(72, 256, 16)-mins"],
        "test_the_engine_gives_the_tokens_of_the_twin": ["int4-eager", "awq-graphs"],
    },
    "test_gpu_lora.py": {
        "test_sums_are_those_of_float64": ["(300, (40, 24, 24), 16)-torch.bfloat16"],
        "test_a_row_has_the_same_bits_in_every_batch": ["(300, (40, 24, 24), 16)-torch.bfloat16"],
        "test_the_engine_gives_the_tokens_of_merged_weights": ["llama-graphs"],
    },
    "test_gpu_switches.py": {"test_greedy_output_equals_generate": ["split_k+launch_pdl-graphs"]},
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        if not runs_in_make_test(item.path.name, item.name):
            item.add_marker(pytest.mark.nightly)
    if not any("::" in argument for argument in config.args):  # which choose some cases of a file
        check_names({item.path.name for item in ours}, {(item.path.name, item.name) for item in ours})


def check_names(files: set[str], cases: set[tuple[str, str]]) -> None:
    """Raises UsageError: `IN_MAKE_TEST` names a case of the collected `files` that is none."""
    for file in files & IN_MAKE_TEST.keys():
        functions = {name.partition("[")[0] for path, name in cases if path == file}
        for function, named in IN_MAKE_TEST[file].items():
            if function not in functions:
                raise pytest.UsageError(f"IN_MAKE_TEST of tests/gpu/conftest.py: {file} has no {function}")
            if unknown := [case for case in named if (file, f"{function}[{case}]") not in cases]:
                raise pytest.UsageError(f"IN_MAKE_TEST of tests/gpu/conftest.py: {file} has no {function}{unknown}")


def runs_in_make_test(file: str, name: str) -> bool:
    """Whether `make test` runs a case, by the name that pytest gives to it."""
    function, _, case = name.partition("[")
    cases = IN_MAKE_TEST.get(file, {}).get(function)
    return cases is None or case.removesuffix("]") in cases


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
